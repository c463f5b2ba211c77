/*
 * The delivery protocol: claim, deliver, commit, acknowledge; one key, and everything
 * that can go wrong on the way, at any step.
 *
 *   python -m spec.check --only ours            (rows.py says with which switches)
 *
 * Copies are of event 0, but for the last one if NEXT or OTHER is set: that is of event 1.
 * NEXT: another event by the same key, published when the window of event 0 has ended.
 * OTHER: an event with the same key and other content, there from the start.
 * RECEIVER: (with OTHER) the receiver deduplicates by the Idempotency-Key header, for good. An
 * event is delivered when the receiver keeps it.
 *
 * Switches that break the worker (those that break the store are in store.pml):
 *   NO_LEASE          a claim never ends
 *   ACK_BUSY          what another worker holds is acknowledged
 *   TOKEN_IS_WORKER   all claims of a worker have the same token
 *   SHORT_WINDOW      (with NEXT) the source brings copies when the window has ended
 *   HEADER_IS_KEY     (with RECEIVER) the header is the key, whatever the content
 *   HASHED_TWICE      (with RECEIVER) in a conflict the content goes into the header once more
 * and such as are another way, not a mistake:
 *   ACK_AFTER_COMMIT  the sink's yes is not enough: acknowledged once the store has it
 *   JOINT             the sink is in the store's database: delivery and commit in one transaction
 *   SAFE_AFTER_YES    nobody dies between the sink's yes and the commit
 */

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef COPIES
#define COPIES 2
#endif
#ifndef DELAYS
#define DELAYS 0      /* commits and releases that are late, or come twice */
#endif
#ifndef UNHEARD
#define UNHEARD 0     /* claims whose answer is lost */
#endif

#ifdef OTHER
#define KEYS 3        /* the key, and for each content the key that it goes by in a conflict */
#define own_key(e) (1 + (e))
#define hash_of(e) (1 + (e))
#else
#define KEYS 1
#define own_key(e) 0
#define hash_of(e) 0
#endif
#if defined(NEXT) || defined(OTHER)
#define EVENTS 2
#define event_of(c) ((c) == COPIES - 1)
#else
#define EVENTS 1
#define event_of(c) 0
#endif
#ifdef NEXT
#ifdef SHORT_WINDOW
#define has_been_long true
#else
#define has_been_long all_acked(0) /* the source brings no copy after that */
#endif
bool is_over;         /* the window of event 0 */
#define is_published(c) (is_over || (c) < COPIES - 1)
#endif

#include "store.pml"
#include "world.pml"

byte delays = DELAYS, unheard = UNHEARD;
#ifdef LOSSES
byte losses = LOSSES;
#endif

/* --- what a worker knows -------------------------------------------------------------- */

byte key[WORKERS];
byte event[WORKERS];         /* the event in hand */
byte token[WORKERS];
byte fence[WORKERS];      /* what its commit goes by: the generation */
bool holds[WORKERS];      /* its lease has not ended, by the clock */
#ifdef NEXT
bool asks[WORKERS];       /* it has a copy, and no answer to its claim */
#define asks_now(is) asks[_pid] = is
#else
#define asks_now(is) skip
#endif

#if WORKERS == 1
#define any(field, n) (field[0] == n)
#define one_holder    true
#define is_held(k)    (holds[0] && owns(k, token[0]))
#elif WORKERS == 2
#define any(field, n) (field[0] == n || field[1] == n)
#define one_holder    !both(0, 1)
#define is_held(k)    ((holds[0] && owns(k, token[0])) || (holds[1] && owns(k, token[1])))
#else
#define any(field, n) (field[0] == n || field[1] == n || field[2] == n)
#define one_holder    !(both(0, 1) || both(0, 2) || both(1, 2))
#define is_held(k)    ((holds[0] && owns(k, token[0])) || (holds[1] && owns(k, token[1])) \
                    || (holds[2] && owns(k, token[2])))
#endif
#define both(v, w) (holds[v] && holds[w] && key[v] == key[w])

/* --- what is under way ------------------------------------------------------------------ */

#define NOTHING 0
#define COMMIT  1
#define RELEASE 2
#define BOTH    3         /* a transaction: event and commit */
#if DELAYS > 0
byte late_kind[DELAYS], late_key[DELAYS], late_fence[DELAYS], late_event[DELAYS];
bool late_excused[DELAYS];
#endif
byte slot;                /* 0 again at the end of every step */

#if DELAYS > 0
#define may_send (delays > 0)
inline send(what, by) {
    delays--;
    slot = 0;
    do
    :: late_kind[slot] != NOTHING -> slot++
    :: else -> break
    od;
    late_kind[slot] = what; late_key[slot] = key[_pid]; late_fence[slot] = by;
    late_event[slot] = event[_pid]; late_excused[slot] = excused[_pid];
    slot = 0
}
#else
#define may_send false
inline send(what, by) { skip }
#endif

/* --- which names are in use ------------------------------------------------------------------ */

#define is_sent(i, kinds, n) (((kinds) & (1 << late_kind[i])) && late_fence[i] == n)
#if DELAYS == 0
#define sent(kinds, n) false
#elif DELAYS == 1
#define sent(kinds, n) is_sent(0, kinds, n)
#else
#define sent(kinds, n) (is_sent(0, kinds, n) || is_sent(1, kinds, n))
#endif
#ifdef OTHER
#define stored(field, n) (store[0].field == n || store[1].field == n || store[2].field == n)
#elif defined(LOSSES)
#define stored(field, n) (store[0].field == n || before.field == n)
#else
#define stored(field, n) (store[0].field == n)
#endif
#ifdef COMMIT_BY_TOKEN
#define is_token(n)      (any(token, n) || stored(token, n) || sent((1 << RELEASE) + (1 << COMMIT), n))
#define is_generation(n) stored(generation, n)
#else
#define is_token(n)      (any(token, n) || stored(token, n) || sent(1 << RELEASE, n))
#define is_generation(n) (any(fence, n) || stored(generation, n) || sent((1 << COMMIT) + (1 << BOTH), n))
#endif

#include "names.pml"

/* --- the steps of a worker ------------------------------------------------------------------- */

#ifdef TOKEN_IS_WORKER
#define my_token (_pid + 1)
#else
#define my_token new_token
#endif

inline ask(t) {
    claim(key[_pid], t, new_generation, hash_of(event[_pid]));
    printf("worker %d claims key %d: %e\n", _pid, key[_pid], said)
}

inline got(t) {
    token[_pid] = t;
#ifdef COMMIT_BY_TOKEN
    fence[_pid] = t;
#else
    fence[_pid] = store[key[_pid]].generation;
#endif
    holds[_pid] = store[key[_pid]].live;
    check(I6, one_holder);
    quiet()
}

/* The attempt is over. What nobody needs any more is the same in all states. */
inline end_attempt() {
    key[_pid] = 0; event[_pid] = 0; token[_pid] = 0; fence[_pid] = 0; holds[_pid] = false;
    excused[_pid] = false; has_sent[_pid] = false;
    asks_now(false);
    quiet()
}

inline hand_back() { later(c); end_attempt() }

inline die() {
    printf("worker %d dies\n", _pid);
    crashes--;
    hand_back()
}

inline commit_now() {
    commit(key[_pid], fence[_pid]);
    printf("worker %d commits: %e\n", _pid, said)
}

#ifdef RECEIVER
/* A header is numbered as the key that it names: 0 is the shared key, 1 and 2 are the keys of the
   two contents, 3 and 4 are those hashed with the content again. */
#if defined(HEADER_IS_KEY)
#define my_header key[_pid]
#elif defined(HASHED_TWICE)
#define my_header (own_key(event[_pid]) + (key[_pid] == 0 -> 0 : 2))
#else
#define my_header own_key(event[_pid])
#endif
bool has_header[5];       /* what the receiver knows */

inline send_event(is_excused) {
    printf("worker %d sends event %d with header %d\n", _pid, event[_pid], my_header);
    if
    :: has_header[my_header] -> printf("the receiver drops it: it has header %d\n", my_header)
    :: else ->
        has_header[my_header] = true;
        deliver(event[_pid], is_excused); has_sent[_pid] = true
    fi
}
#else
inline send_event(is_excused) {
    deliver(event[_pid], is_excused); has_sent[_pid] = true
}
#endif

inline release_now() {
    release(key[_pid], token[_pid]);
    printf("worker %d releases: %e\n", _pid, said)
}

#define DIES :: atomic { crashes > 0 -> d_step { die() }; goto end_idle }

active [WORKERS] proctype worker()
{
    byte c; /* the copy in hand */

end_idle:
    atomic { take(c); event[_pid] = event_of(c); asks_now(true) };

claiming:
    if
    :: atomic {
        d_step { roll(); ask(my_token) };
        if
        :: said == OK -> d_step { got(my_token); asks_now(false) }; goto holding
        :: said == OK && unheard > 0 ->
            d_step { unheard--; printf("worker %d does not hear it\n", _pid); got(my_token) };
            goto unsure
        :: said == DUPLICATE -> d_step { end_attempt() }; goto known
        :: said == MISMATCH -> d_step { key[_pid] = own_key(event[_pid]); quiet() }; goto claiming
        :: said == BUSY ->
#ifdef ACK_BUSY
            d_step { end_attempt() }; goto known
#else
            d_step { hand_back() }; goto end_idle
#endif
        fi
      }
    DIES
    fi;

unsure: /* it asks again with the same token, or gives up and releases what it may hold */
    if
    :: atomic {
        d_step { roll(); ask(token[_pid]) };
        if
        :: said == OK -> d_step { got(token[_pid]); asks_now(false) }; goto holding
        :: else -> d_step { hand_back() }; goto end_idle
        fi
      }
    :: atomic { d_step { release_now(); hand_back() }; goto end_idle }
    DIES
    fi;

holding:
    if
#ifndef JOINT
    :: atomic { d_step { send_event(excused[_pid]) }; goto yes }
    :: atomic { unclear > 0 ->
        d_step {
            unclear--; printf("worker %d does not hear the sink\n", _pid);
            excused[_pid] = true; send_event(true); has_sent[_pid] = false
        };
        goto failed
      }
#else
    :: atomic {
        d_step { commit_now() };
        if
        :: said == OK -> d_step { deliver(event[_pid], excused[_pid]); end_attempt() }; goto known
        :: said == ALREADY -> d_step { end_attempt() }; goto known
        :: said == FENCED -> d_step { hand_back() }; goto end_idle
        fi
      }
    :: atomic { unclear > 0 ->
        d_step { unclear--; printf("worker %d does not hear it\n", _pid); commit_now() };
        if
        :: said == OK -> d_step { deliver(event[_pid], excused[_pid]); quiet() }
        :: else -> quiet()
        fi;
        goto failed
      }
    :: atomic { may_send ->
        d_step { send(BOTH, fence[_pid]); printf("the transaction of worker %d is late\n", _pid) };
        goto failed
      }
#endif
    :: atomic { refusals > 0 ->
        d_step { refusals--; printf("the sink refuses worker %d\n", _pid) };
        goto failed
      }
    :: atomic { !holds[_pid] -> /* it sees that its lease has ended, before it sends */
        d_step { extend(key[_pid], token[_pid]); printf("worker %d extends: %e\n", _pid, said) };
        if
        :: said == OK -> d_step { holds[_pid] = true; check(I6, one_holder); quiet() }; goto holding
        :: else -> d_step { hand_back() }; goto end_idle
        fi
      }
    DIES
    fi;

yes:
    if
    :: atomic {
        if
        :: may_send -> /* something on the way repeats it */
            d_step {
                send(COMMIT, fence[_pid]); printf("the commit of worker %d comes twice\n", _pid)
            }
        :: true
        fi;
        d_step { commit_now() };
        if
#ifdef ACK_AFTER_COMMIT
        :: said == FENCED -> d_step { hand_back() }; goto end_idle
        :: said != FENCED -> d_step { end_attempt() }; goto known
#else
        :: d_step { end_attempt() }; goto known
#endif
        fi
      }
    :: atomic { may_send -> /* there is no answer in time */
        d_step { send(COMMIT, fence[_pid]); printf("the commit of worker %d is late\n", _pid) };
#ifdef ACK_AFTER_COMMIT
        d_step { hand_back() }; goto end_idle
#else
        d_step { end_attempt() }; goto known
#endif
      }
#ifndef SAFE_AFTER_YES
    :: atomic { crashes > 0 ->
        d_step { excuse(event[_pid], has_sent[_pid], excused[_pid]); die() };
        goto end_idle
      }
#endif
    fi;

failed:
    if
    :: atomic {
        if
        :: may_send ->
            d_step {
                send(RELEASE, token[_pid]); printf("the release of worker %d comes twice\n", _pid)
            }
        :: true
        fi;
        d_step { release_now(); hand_back() };
        goto end_idle
      }
    :: atomic { may_send ->
        d_step {
            send(RELEASE, token[_pid]); printf("the release of worker %d is late\n", _pid);
            hand_back()
        };
        goto end_idle
      }
    DIES
    fi;

known: /* delivered, by this worker or as the store says */
    if
    :: atomic { d_step { ack(c) }; goto end_idle }
    DIES
    fi
}

/* --- time, the source and the network ------------------------------------------------------------ */

/* The commit could not be recorded before the lease ended. */
#ifdef COMMIT_BY_TOKEN
#define is_late(i, k) (late_kind[i] == COMMIT && late_key[i] == (k) && owns(k, late_fence[i]))
#else
#define is_late(i, k) (late_kind[i] == COMMIT && late_key[i] == (k) \
                    && late_fence[i] == store[k].generation)
#endif
#define excuse_late_at(i, k) \
    if :: is_late(i, k) -> excuse(late_event[i], true, late_excused[i]) :: else fi
#if DELAYS == 0
#define excuse_late(k) skip
#elif DELAYS == 1
#define excuse_late(k) excuse_late_at(0, k)
#else
#define excuse_late(k) excuse_late_at(0, k); excuse_late_at(1, k)
#endif

/* The lease of a worker that died or went on. */
#define LEASE_ENDS(k) :: d_step { is_claimed(k) && !is_held(k) -> \
    store[k].live = false; printf("the lease on key %d ends\n", k); excuse_late(k) }

/* The lease of a worker that stands still. */
#define STANDS_STILL(w) :: d_step { stalls > 0 && holds[w] -> \
    stalls--; holds[w] = false; excuse(event[w], has_sent[w], excused[w]); \
    printf("worker %d stands still until its lease ends\n", w); \
    if :: owns(key[w], token[w]) -> store[key[w]].live = false :: else fi }

#define LANDS(i) :: d_step { late_kind[i] != NOTHING -> \
    if \
    :: late_kind[i] == RELEASE -> release(late_key[i], late_fence[i]); \
        printf("the other release lands: %e\n", said) \
    :: else -> commit(late_key[i], late_fence[i]); \
        printf("the other commit lands: %e\n", said); \
        if \
        :: said == OK && late_kind[i] == BOTH -> \
            deliver(late_event[i], late_excused[i]) \
        :: else \
        fi \
    fi; \
    late_kind[i] = NOTHING; late_key[i] = 0; late_fence[i] = 0; \
    late_event[i] = 0; late_excused[i] = false; quiet() }

#ifdef LOSSES
/* What was known is gone; whoever delivered or holds by it has an excuse. */
inline forget() {
    losses--;
    printf("the store loses what it knew\n");
    entered[0] = is_done(0);
    unexcused[0] = 0;
    slot = 0;
    do
    :: slot < WORKERS -> excused[slot] = (token[slot] != 0); slot++
    :: else -> break
    od;
#if DELAYS > 0
    slot = 0;
    do
    :: slot < DELAYS -> late_excused[slot] = (late_kind[slot] != NOTHING); slot++
    :: else -> break
    od;
#endif
    slot = 0
}
#endif

active proctype world()
{
end:
    do
#ifndef NO_LEASE
    LEASE_ENDS(0)
#ifdef OTHER
    LEASE_ENDS(1)
    LEASE_ENDS(2)
#endif
    STANDS_STILL(0)
#if WORKERS > 1
    STANDS_STILL(1)
#endif
#if WORKERS > 2
    STANDS_STILL(2)
#endif
#endif
    COMES_EARLY(0)
#if COPIES > 1
    COMES_EARLY(1)
#endif
#if COPIES > 2
    COMES_EARLY(2)
#endif
#if DELAYS > 0
    LANDS(0)
#endif
#if DELAYS > 1
    LANDS(1)
#endif
#ifdef NEXT
    /* It lasts longer than any lease, and than any worker waits for an answer. What stands still
       or is late may well outlast it. */
    :: d_step { is_done(0) && !is_over && has_been_long && !any(holds, true) && !any(asks, true) ->
        is_over = true; store[0].live = false; entered[0] = false;
        printf("the window ends, and event 1 is published\n") }
#endif
#ifdef LOSSES
    :: d_step { losses > 0 -> /* everything */
        store[0].state = ABSENT; store[0].live = false; store[0].token = 0;
        store[0].generation = 0; forget() }
    :: d_step { losses > 0 -> /* the last write: another server goes on from an older state */
        store[0].state = before.state; store[0].live = before.live;
        store[0].token = before.token; store[0].generation = before.generation; forget() }
#endif
    od
}
