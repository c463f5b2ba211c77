/*
 * Owed commits: the store is unavailable for a while, and a worker owes it a commit.
 *
 * After the sink's yes the copy is acknowledged even if the commit did not reach the store. The
 * worker owes the commit, and knows from it that the event was delivered. In the same way it
 * owes a release after a failure. These are its debts, by key. They are paid when the store is
 * available again.
 *
 * A copy with the key and the content of an owed delivery is a duplicate while the window lasts,
 * counted from the yes. Any other copy of a key with a debt waits: the debt is paid before the
 * key is claimed. A debt whose window has ended is dropped.
 *
 * Copies are of event 0, but for the last one if NEXT, OTHER or STUCK is set: that is of event 1.
 * NEXT: another event by the same key, published when the window of event 0 has ended.
 * OTHER: an event with the same key and other content, there from the start.
 * STUCK: an event with a key of its own; the store never answers again for the key of event 0.
 * FAIL_OPEN: while the store is unavailable, events are delivered without a claim, and the worker
 * owes the memory of it (`on_store_outage = "deliver"`).
 *
 * An excuse needs another worker or a crash. A worker that delivers an event again although it
 * still owes its commit has no excuse.
 *
 * Switches that break it:
 *   IGNORE_DEBTS      the worker does not check its debts before it claims or delivers
 *   ONE_KEY           (with OTHER) it does not check the key that the content has in a conflict
 *   TRUST_RELEASE     a copy is a duplicate of an owed release
 *   ANY_CONTENT       a copy is a duplicate of an owed delivery with other content
 *   FOR_EVER          a copy is a duplicate of an owed delivery whose window has ended
 *   FROM_PAYMENT      the window begins when the debt is paid, however late that is
 *   HOLD_ALL          a debt holds back all keys
 */

#ifndef WORKERS
#define WORKERS 2
#elif WORKERS != 2
#error "this model has two workers"
#endif
#ifndef COPIES
#define COPIES 2
#endif
#ifndef OUTAGES
#define OUTAGES 0     /* the store is unavailable for a while: no operation reaches it */
#endif

#if defined(NEXT) || defined(OTHER) || defined(STUCK)
#define EVENTS 2
#define event_of(c) ((c) == COPIES - 1)
#else
#define EVENTS 1
#define event_of(c) 0
#endif
#if defined(OTHER)
#define KEYS 3        /* the key, and for each content the key that it goes by in a conflict */
#define key_of(e)  0
#define own_key(e) (1 + (e))
#define hash_of(e) (1 + (e))
#elif defined(STUCK)
#define KEYS 2
#define key_of(e)  (e)
#define own_key(e) (e)
#define hash_of(e) 0
#else
#define KEYS 1
#define key_of(e)  0
#define own_key(e) 0
#define hash_of(e) 0
#endif
#ifdef NEXT
bool is_over;         /* the window of event 0 */
#define is_published(c) (is_over || (c) < COPIES - 1)
#endif

#include "store.pml"
#include "world.pml"

byte outages = OUTAGES;
#ifdef FROM_PAYMENT
bool is_paid;         /* the record is done by a debt that was paid */
#define notes_payment is_paid = true
#else
#define is_paid false
#define notes_payment skip
#endif
bool is_down;
#ifdef STUCK
bool is_stuck;
#define answers(k) (!is_down && !(is_stuck && (k) == 0))
#else
#define answers(k) (!is_down)
#endif

/* --- what a worker knows, and what it owes --------------------------------------------- */

byte key[WORKERS];
byte event[WORKERS];
byte token[WORKERS];
byte fence[WORKERS];

#define NOTHING 0
#define COMMIT  1
#define MEMORY  2     /* delivered without a claim */

typedef Debt {
    byte kind;        /* what is owed of a delivery */
    byte event;
    byte life;        /* of a commit: the generation */
    bool is_over;     /* the window, counted from the yes */
    bool excused;
    byte unreleased   /* the token of an owed release; 0: none */
};
Debt debt[WORKERS * KEYS];
byte at;              /* 0 again at the end of every step */

#define owed(w, k)      debt[(w) * KEYS + (k)]
#define owes(w, k)      (owed(w, k).kind != NOTHING || owed(w, k).unreleased != 0)

#define any(field, n)    (field[0] == n || field[1] == n)
#define is_held(k)       (owns(k, token[0]) || owns(k, token[1]))
#define owed_of(k, f, n) (owed(0, k).f == n || owed(1, k).f == n)
#if KEYS == 1
#define stored(field, n) (store[0].field == n)
#define any_owed(f, n)   owed_of(0, f, n)
#elif KEYS == 2
#define stored(field, n) (store[0].field == n || store[1].field == n)
#define any_owed(f, n)   (owed_of(0, f, n) || owed_of(1, f, n))
#define owes_any(w)      (owes(w, 0) || owes(w, 1))
#else
#define stored(field, n) (store[0].field == n || store[1].field == n || store[2].field == n)
#define any_owed(f, n)   (owed_of(0, f, n) || owed_of(1, f, n) || owed_of(2, f, n))
#endif
#define is_token(n)      (any(token, n) || stored(token, n) || any_owed(unreleased, n))
#define is_generation(n) (any(fence, n) || stored(generation, n) || any_owed(life, n))

#include "names.pml"

/* Whether the worker knows by a debt on the key that it delivered the event. */
#ifdef FOR_EVER
#define is_recent(w, k) true
#else
#define is_recent(w, k) (!owed(w, k).is_over)
#endif
#ifdef ANY_CONTENT
#define is_content(w, k, e) true
#else
#define is_content(w, k, e) same(hash_of(owed(w, k).event), hash_of(e))
#endif
#define is_delivery(w, k, e) (owed(w, k).kind != NOTHING && is_recent(w, k) && is_content(w, k, e))
#ifdef ONE_KEY
#define knows(w, e) is_delivery(w, key_of(e), e)
#else
#define knows(w, e) (is_delivery(w, key_of(e), e) || is_delivery(w, own_key(e), e))
#endif

#ifdef IGNORE_DEBTS
#define is_known      false
#define holds_back(k) false
#define may_open(k)   true
#else
#ifdef TRUST_RELEASE
#define is_known      (knows(_pid, event[_pid]) || owed(_pid, key[_pid]).unreleased != 0)
#else
#define is_known      knows(_pid, event[_pid])
#endif
#ifdef HOLD_ALL
#define holds_back(k) owes_any(_pid)
#else
#define holds_back(k) owes(_pid, k)
#endif
/* A delivery of other content, whose window lasts, has to be recorded first. */
#define may_open(k)   (owed(_pid, k).kind == NOTHING || owed(_pid, k).is_over)
#endif

inline clear_delivery(w, k) {
    owed(w, k).kind = NOTHING; owed(w, k).event = 0; owed(w, k).life = 0;
    owed(w, k).is_over = false; owed(w, k).excused = false
}

inline owe(k, what) {
    owed(_pid, k).kind = what; owed(_pid, k).event = event[_pid];
    owed(_pid, k).life = fence[_pid]; owed(_pid, k).is_over = false;
    owed(_pid, k).excused = excused[_pid]
}

/* For I3: the worker's own delivery of the event, still to be recorded. */
#define is_own(w, k, e) (owed(w, k).kind != NOTHING && !owed(w, k).is_over && owed(w, k).event == (e))
#define was_own(w, e) (is_own(w, key_of(e), e) || is_own(w, own_key(e), e))

/* The debt is gone, or another worker took the key or the event before it was paid. */
inline excuse_debt(d) {
    if
    :: debt[d].kind != NOTHING -> excuse(debt[d].event, true, debt[d].excused)
    :: else
    fi
}

inline excuse_others(w, is_meant) {
    for (at : 0 .. WORKERS * KEYS - 1) {
        if
        :: at / KEYS != w && (is_meant) -> excuse_debt(at)
        :: else
        fi
    }
    at = 0
}

/* --- the steps of a worker ------------------------------------------------------------------- */

inline end_attempt() {
    key[_pid] = 0; event[_pid] = 0; token[_pid] = 0; fence[_pid] = 0;
    excused[_pid] = false; has_sent[_pid] = false;
    quiet()
}

inline hand_back() { later(c); end_attempt() }

inline die() {
    printf("worker %d dies\n", _pid);
    crashes--;
    for (at : _pid * KEYS .. _pid * KEYS + KEYS - 1) {
        excuse_debt(at);
        debt[at].kind = NOTHING; debt[at].event = 0; debt[at].life = 0;
        debt[at].is_over = false; debt[at].excused = false; debt[at].unreleased = 0
    }
    at = 0;
    hand_back()
}

inline ask() {
    claim(key[_pid], new_token, new_generation, hash_of(event[_pid]));
    printf("worker %d claims key %d: %e\n", _pid, key[_pid], said)
}

inline got() {
    token[_pid] = new_token; fence[_pid] = store[key[_pid]].generation;
    excuse_others(_pid, at % KEYS == key[_pid]);
    quiet()
}

#define DIES :: atomic { crashes > 0 -> d_step { die() }; goto end_idle }

active [WORKERS] proctype worker()
{
    byte c; /* the copy in hand */

end_idle:
    atomic { take(c); event[_pid] = event_of(c); key[_pid] = key_of(event_of(c)) };

asking:
    if
    :: atomic { is_known ->
        d_step { printf("worker %d finds it among its debts\n", _pid); end_attempt() };
        goto known
      }
    :: atomic { !is_known && !holds_back(key[_pid]) && answers(key[_pid]) ->
        d_step { roll(); ask() };
        if
        :: said == OK -> d_step { got() }; goto holding
        :: said == DUPLICATE -> d_step { end_attempt() }; goto known
#ifdef OTHER
        :: said == MISMATCH -> d_step { key[_pid] = own_key(event[_pid]); quiet() }; goto asking
#endif
        :: said == BUSY -> d_step { hand_back() }; goto end_idle
        fi
      }
#ifdef FAIL_OPEN
    :: atomic { !is_known && is_down && may_open(key[_pid]) ->
        printf("worker %d continues without a claim\n", _pid);
        goto open
      }
#endif
    :: atomic { !is_known && (holds_back(key[_pid]) || !answers(key[_pid])) ->
        d_step { printf("worker %d returns copy %d\n", _pid, c); hand_back() };
        goto end_idle
      }
    DIES
    fi;

holding:
    if
    :: atomic {
        d_step {
            excuse_others(_pid, debt[at].event == event[_pid]);
            deliver(event[_pid], excused[_pid]); has_sent[_pid] = true
        };
        goto yes
      }
    :: atomic { unclear > 0 ->
        d_step {
            unclear--; printf("worker %d does not hear the sink\n", _pid);
            deliver(event[_pid], true)
        };
        goto failed
      }
    :: atomic { refusals > 0 ->
        d_step { refusals--; printf("the sink refuses worker %d\n", _pid) };
        goto failed
      }
    DIES
    fi;

yes:
    if
    :: atomic { answers(key[_pid]) ->
        d_step {
            commit(key[_pid], fence[_pid]); printf("worker %d commits: %e\n", _pid, said);
            end_attempt()
        };
        goto known
      }
    :: atomic { !answers(key[_pid]) ->
        d_step {
            printf("worker %d owes the commit on key %d\n", _pid, key[_pid]);
            owe(key[_pid], COMMIT); end_attempt()
        };
        goto known
      }
    :: atomic { crashes > 0 ->
        d_step { excuse(event[_pid], has_sent[_pid], excused[_pid]); die() };
        goto end_idle
      }
    fi;

failed:
    if
    :: atomic { answers(key[_pid]) ->
        d_step {
            release(key[_pid], token[_pid]); printf("worker %d releases: %e\n", _pid, said);
            hand_back()
        };
        goto end_idle
      }
    :: atomic { !answers(key[_pid]) ->
        d_step {
            printf("worker %d owes the release of key %d\n", _pid, key[_pid]);
            owed(_pid, key[_pid]).unreleased = token[_pid]; hand_back()
        };
        goto end_idle
      }
    DIES
    fi;

#ifdef FAIL_OPEN
open: /* a duplicate of another worker's delivery is excused, one of its own is not */
    if
    :: atomic {
        d_step {
            excuse_others(_pid, debt[at].event == event[_pid]);
            excused[_pid] = delivered[event[_pid]] && !was_own(_pid, event[_pid]);
            deliver(event[_pid], excused[_pid]);
            owe(key[_pid], MEMORY); end_attempt()
        };
        goto known
      }
    :: atomic { unclear > 0 ->
        d_step {
            unclear--; printf("worker %d does not hear the sink\n", _pid);
            deliver(event[_pid], true); hand_back()
        };
        goto end_idle
      }
    :: atomic { refusals > 0 ->
        d_step { refusals--; printf("the sink refuses worker %d\n", _pid); hand_back() };
        goto end_idle
      }
    DIES
    fi;
#endif

known: /* delivered, by this worker or according to its debts or the store */
    if
    :: atomic { d_step { ack(c) }; goto end_idle }
    DIES
    fi
}

/* --- time, the source and the store ---------------------------------------------------------- */

#define LEASE_ENDS(k) :: d_step { is_claimed(k) && !is_held(k) -> \
    store[k].live = false; printf("the lease on key %d ends\n", k) }

#define STANDS_STILL(w) :: d_step { stalls > 0 && token[w] != 0 -> \
    stalls--; excuse(event[w], has_sent[w], excused[w]); \
    printf("worker %d stands still until its lease ends\n", w); \
    if :: owns(key[w], token[w]) -> store[key[w]].live = false :: else fi }

/* The release is paid first: a memory is refused while a claim lasts. Any answer settles a debt. */
#define PAYS_RELEASE(w, k) :: d_step { answers(k) && owed(w, k).unreleased != 0 -> \
    release(k, owed(w, k).unreleased); owed(w, k).unreleased = 0; \
    printf("worker %d pays the release of key %d: %e\n", w, k, said); quiet() }

#define PAYS_COMMIT(w, k) :: d_step { answers(k) && owed(w, k).kind == COMMIT && may_pay(w, k) -> \
    commit(k, owed(w, k).life); \
    printf("worker %d pays the commit on key %d: %e\n", w, k, said); \
    if :: said == FENCED -> excuse_debt((w) * KEYS + (k)) :: else -> notes_payment fi; \
    clear_delivery(w, k); quiet() }

#ifdef FAIL_OPEN
#define PAYS_MEMORY(w, k) :: d_step { answers(k) && owed(w, k).kind == MEMORY \
                                   && owed(w, k).unreleased == 0 && may_pay(w, k) -> \
    roll(); remember(k, new_generation); \
    store[k].hash = (said == OK -> hash_of(owed(w, k).event) : store[k].hash); \
    printf("worker %d pays the memory of key %d: %e\n", w, k, said); \
    if \
    :: said == KNOWN -> excuse_debt((w) * KEYS + (k)) \
    :: else -> excuse_others(w, at % KEYS == k) \
    fi; \
    clear_delivery(w, k); quiet() }
#else
#define PAYS_MEMORY(w, k)
#endif

#ifdef NEXT
#ifdef FROM_PAYMENT
#define may_pay(w, k) true
#else
#define may_pay(w, k) (!owed(w, k).is_over)
#endif
#define DROPS(w, k) :: d_step { owed(w, k).kind != NOTHING && !may_pay(w, k) -> \
    printf("worker %d drops its debt on key %d: the window has ended\n", w, k); \
    clear_delivery(w, k) }
#else
#define may_pay(w, k) true
#define DROPS(w, k)
#endif

#define DEBTS(w, k) PAYS_RELEASE(w, k) PAYS_COMMIT(w, k) PAYS_MEMORY(w, k) DROPS(w, k)

#define ALL_DEBTS(k) DEBTS(0, k) DEBTS(1, k)

active proctype world()
{
end:
    do
    LEASE_ENDS(0)
    ALL_DEBTS(0)
#if KEYS > 1
    LEASE_ENDS(1)
    ALL_DEBTS(1)
#endif
#if KEYS > 2
    LEASE_ENDS(2)
    ALL_DEBTS(2)
#endif
    STANDS_STILL(0)
    STANDS_STILL(1)
    COMES_EARLY(0)
    COMES_EARLY(1)
#if COPIES > 2
    COMES_EARLY(2)
#endif
    :: d_step { outages > 0 && !is_down ->
        outages--; is_down = true; printf("the store is unavailable\n") }
    :: d_step { is_down -> is_down = false; printf("the store is available again\n") }
#ifdef STUCK
    :: d_step { !is_stuck && place[0] == ACKED && any_owed(kind, COMMIT) ->
        is_stuck = true; printf("the store does not answer for key 0 any more\n") }
#endif
#ifdef NEXT
    /* The source brings no copy of event 0 after that, and no lease lasts so long. */
    :: d_step { !is_over && all_acked(0) && !is_claimed(0) ->
        is_over = true; store[0].live = (is_done(0) && is_paid); entered[0] = false;
        for (at : 0 .. WORKERS - 1) { debt[at].is_over = (debt[at].kind != NOTHING) }
        at = 0;
        printf("the window ends, and event 1 is published\n") }
#endif
    od
}
