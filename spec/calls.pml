/*
 * Claim calls: one token and one generation for all keys of a call.
 *
 * A worker takes a batch of copies and claims the keys of all of them in one call. The keys of a
 * call are distinct, and all of them are asked for under one draw: one fresh token, one fresh
 * generation. Every later call of the batch draws anew: for an event whose key an earlier event
 * of the batch has (the next wave), for the key by which other content goes in a conflict, and
 * for a key that was busy or released and is claimed again in place.
 *
 * A call is answered key by key. The request for a key, or its answer, may be lost or late. What
 * was not answered is asked for again, under the same draw and only that; or it is given up and
 * released, by token and key.
 *
 * Every event has one copy. Events 0, 1 ... have keys of their own; with OTHER, events 0 and 1
 * have one key and different content, and event 2 a key of its own.
 *
 * Switches that break it:
 *   ONE_DRAW          one draw for all the calls of a batch
 *   RELEASE_ALL       a release ends all holds with the token, whatever the key
 *   EXTEND_ALL        an extension prolongs all holds with the token, and is granted if there is one
 *   ASSUME_GENERATION a first attempt is committed under the generation that was asked for
 *   LEASE_FROM_RESEND the lease is counted from the request that was answered, not from the first
 *   MIX               what was not answered is asked for again together with other keys, under
 *                     the draw of the call that was not answered
 * and such as are another way, not a mistake that loses or repeats:
 *   MIX_NEW           the same, but only with keys that were never asked for under that draw
 *   FRESH_RESEND      what was not answered is asked for again under a fresh draw
 */

#ifndef WORKERS
#define WORKERS 2
#elif WORKERS > 2
#error "this model has one or two workers"
#endif
#ifndef COPIES
#define COPIES 2
#endif
#ifndef DELAYS
#define DELAYS 0      /* claims, commits and releases that are late, or come twice */
#endif
#ifndef UNHEARD
#define UNHEARD 0     /* answers to the claim of a key that are lost */
#endif
#ifndef UNSENT
#define UNSENT 0      /* events that are released before they are sent */
#endif

#define EVENTS COPIES
#define event_of(c) (c)
#ifdef OTHER
#define KEYS (1 + COPIES) /* the shared key, one for each of its contents, and that of event 2 */
#define key_of(e)    ((e) == 2 -> 3 : 0)
#define own_key(e)   (1 + (e))
#define hash_of(e)   ((e) == 2 -> 0 : 1 + (e))
#define is_own(e, k) ((e) < 2 && (k) == own_key(e))
#else
#define KEYS COPIES
#define key_of(e)    (e)
#define hash_of(e)   0
#define is_own(e, k) false
#endif
#define ATTEMPTS

#include "store.pml"
#include "world.pml"

byte delays = DELAYS, unheard = UNHEARD, unsent = UNSENT;

/* --- what a worker knows ---------------------------------------------------------------- */

#define NOTHING  0
#define WANTED   1    /* not claimed yet, or not by this key */
#define AGAIN    2    /* busy or released; claimed again when nothing else of the batch goes on */
#define ASKED    3
#define UNSURE   4    /* asked, and not answered */
#define HELD     5
#define ACCEPTED 6    /* by the sink */

/* Of each event in the hand of each worker. */
#define ITEMS (WORKERS * EVENTS)
#define its(w, e) ((w) * EVENTS + (e))
#define my(e)     its(_pid, e)
byte phase[ITEMS];
byte key[ITEMS];
byte token[ITEMS];
byte fence[ITEMS];    /* the generation asked for, and once it is held that of the record */
bool holds[ITEMS];    /* its lease has not ended, by the worker's clock */
bool has_excuse[ITEMS];
#ifdef FRESH_RESEND
byte first[ITEMS];    /* the token with which it was asked before */
#else
#define first token
#endif

#ifdef ONE_DRAW
byte batch_token[WORKERS], batch_generation[WORKERS];
#endif

#if EVENTS == 2
#define any_of(w, what) (what(its(w, 0)) || what(its(w, 1)))
#else
#define any_of(w, what) (what(its(w, 0)) || what(its(w, 1)) || what(its(w, 2)))
#endif
#define is_there(i)   (phase[i] != NOTHING)
#define is_active(i)  (phase[i] >= ASKED)
#define has_hold(i)   (holds[i] && (phase[i] >= HELD || owns(key[i], token[i])))

/* An event waits for the earlier one of the batch that has its key. */
#ifdef OTHER
#define is_next(e) (phase[my(e)] == WANTED \
                 && !((e) == 1 && phase[my(0)] != NOTHING && key[my(0)] == key[my(1)]))
#define is_again(e) (phase[my(e)] == AGAIN \
                 && !((e) == 1 && phase[my(0)] != NOTHING && key[my(0)] == key[my(1)]))
#else
#define is_next(e)  (phase[my(e)] == WANTED)
#define is_again(e) (phase[my(e)] == AGAIN)
#endif
#define may_ask(e) (is_next(e) || (is_again(e) && !any_of(_pid, is_active)))

/* --- what is under way -------------------------------------------------------------------- */

#define CLAIM   1
#define COMMIT  2
#define RELEASE 3
#define RETURN  4     /* a release of what was not sent */

#if DELAYS > 0
byte late_kind[DELAYS], late_key[DELAYS], late_token[DELAYS], late_fence[DELAYS], late_event[DELAYS];
bool late_excused[DELAYS];
#endif

/* All of these are 0 again at the end of every step. */
byte at, slot;
int tokens, generations; /* which are in use, a bit each */

#define may_send (delays > 0)
inline send(what) {
#if DELAYS > 0
    delays--;
    slot = 0;
    do
    :: late_kind[slot] != NOTHING -> slot++
    :: else -> break
    od;
    late_kind[slot] = what; late_key[slot] = key[my(c)]; late_token[slot] = token[my(c)];
    late_fence[slot] = fence[my(c)]; late_event[slot] = c; late_excused[slot] = has_excuse[my(c)];
    slot = 0
#else
    skip
#endif
}

/* --- which names are in use ----------------------------------------------------------------- */

#define is_token(n)      ((tokens >> (n)) & 1)
#define is_generation(n) ((generations >> (n)) & 1)

#include "names.pml"

inline draw() {
    for (at : 0 .. KEYS - 1) {
        tokens = tokens | (1 << store[at].token);
        generations = generations | (1 << store[at].generation)
    }
    for (at : 0 .. ITEMS - 1) {
        tokens = tokens | (1 << token[at]);
#ifdef FRESH_RESEND
        tokens = tokens | (1 << first[at]);
#endif
        generations = generations | (1 << fence[at])
    }
#if DELAYS > 0
    for (at : 0 .. DELAYS - 1) {
        tokens = tokens | (1 << late_token[at]);
        generations = generations | (1 << late_fence[at])
    }
#endif
#ifdef ONE_DRAW
    for (at : 0 .. WORKERS - 1) {
        tokens = tokens | (1 << batch_token[at]);
        generations = generations | (1 << batch_generation[at])
    }
#endif
    roll();
    at = 0; tokens = 0; generations = 0
}

/* --- the steps of a worker ------------------------------------------------------------------- */

inline accept() {
    place[c] = AT(_pid);
    phase[my(c)] = WANTED; key[my(c)] = key_of(c);
    printf("worker %d takes copy %d, of event %d\n", _pid, c, c)
}

#if defined(MIX) || defined(MIX_NEW)
#ifdef MIX
#define may_join(e) true
#else
#define may_join(e) is_own(e, key[my(e)])
#endif
byte other;

/* The draw is that of a call of this worker that was not answered. */
inline join_call(e) {
    for (other : 0 .. EVENTS - 1) {
        if
        :: may_join(e) && phase[my(other)] == UNSURE ->
            token[my(e)] = token[my(other)]; fence[my(e)] = fence[my(other)]
        :: else
        fi
    }
    other = 0
}
#endif

inline start_call() {
    draw();
#ifdef ONE_DRAW
    if
    :: batch_token[_pid] != 0 ->
        new_token = batch_token[_pid]; new_generation = batch_generation[_pid]
    :: else ->
        batch_token[_pid] = new_token; batch_generation[_pid] = new_generation
    fi;
#endif
    printf("worker %d starts a claim call\n", _pid);
    slot = any_of(_pid, is_active);
    for (at : 0 .. EVENTS - 1) {
        if
        :: is_next(at) || (is_again(at) && !slot) ->
            phase[my(at)] = ASKED; holds[my(at)] = true;
            token[my(at)] = new_token; fence[my(at)] = new_generation;
#ifdef FRESH_RESEND
            first[my(at)] = new_token;
#endif
#if defined(MIX) || defined(MIX_NEW)
            join_call(at)
#endif
        :: else
        fi
    }
    at = 0; slot = 0; quiet()
}

inline ask() {
    claim(key[my(c)], token[my(c)], fence[my(c)], hash_of(c));
    printf("worker %d claims key %d for event %d: %e\n", _pid, key[my(c)], c, said);
    check(C1, said != BUSY || !owns(key[my(c)], first[my(c)]))
}

inline check_holders() {
    for (at : 0 .. ITEMS - 1) {
        check(I6, at == my(c) || phase[at] < HELD || !holds[at]
               || !holds[my(c)] || key[at] != key[my(c)])
    }
    at = 0
}

inline got() {
    phase[my(c)] = HELD;
#ifdef ASSUME_GENERATION
    fence[my(c)] = (store[key[my(c)]].attempts == 1 -> fence[my(c)] : store[key[my(c)]].generation);
#else
    /* Answered HELD, the worker does not hear the generation: it takes the one it asked for. */
    fence[my(c)] = (is_as_asked(key[my(c)], fence[my(c)]) -> fence[my(c)]
                                                             : store[key[my(c)]].generation);
#endif
#ifdef LEASE_FROM_RESEND
    holds[my(c)] = true;
#else
    holds[my(c)] = store[key[my(c)]].live; /* sent again, a claim does not prolong the lease */
#endif
    check_holders();
    quiet()
}

/* What nobody needs any more is the same in all states. */
inline forget(w, e) {
    phase[its(w, e)] = NOTHING; key[its(w, e)] = 0;
    token[its(w, e)] = 0; fence[its(w, e)] = 0;
    holds[its(w, e)] = false; has_excuse[its(w, e)] = false;
#ifdef FRESH_RESEND
    first[its(w, e)] = 0;
#endif
#ifdef ONE_DRAW
    if
    :: !any_of(w, is_there) -> batch_token[w] = 0; batch_generation[w] = 0
    :: else
    fi;
#endif
    quiet()
}

inline hand_back() {
    place[c] = (place[c] == AT(_pid) -> QUEUED : place[c]);
    forget(_pid, c)
}

/* It stays in the batch, by the key that it has or by its own. */
inline claim_again(p, k) {
    phase[my(c)] = p; key[my(c)] = k; token[my(c)] = 0; fence[my(c)] = 0;
    holds[my(c)] = false; has_excuse[my(c)] = false;
#ifdef FRESH_RESEND
    first[my(c)] = 0;
#endif
    quiet()
}

inline acknowledge() {
    forget(_pid, c);
    slot = c;
    ack(c);
    c = slot; slot = 0
}

inline die() {
    printf("worker %d dies\n", _pid);
    crashes--;
    for (c : 0 .. EVENTS - 1) {
        if
        :: phase[my(c)] == ACCEPTED -> excuse(c, true, has_excuse[my(c)])
        :: else
        fi;
        if
        :: phase[my(c)] != NOTHING -> hand_back()
        :: else
        fi
    }
    c = 0
}

inline release_one(k, t, is_unsent) {
    if
    :: is_unsent -> release_unsent(k, t)
    :: else -> release(k, t)
    fi
}

#ifdef RELEASE_ALL
inline let_go(k, t, is_unsent) {
    for (at : 0 .. KEYS - 1) {
        if
        :: owns(at, t) -> release_one(at, t, is_unsent)
        :: else
        fi
    }
    at = 0
}
#else
inline let_go(k, t, is_unsent) { release_one(k, t, is_unsent) }
#endif

#ifdef EXTEND_ALL
inline prolong() {
    slot = false;
    for (at : 0 .. KEYS - 1) {
        extend(at, token[my(c)]);
        slot = slot || said == OK
    }
    said = (slot -> OK : FENCED);
    at = 0; slot = 0
}
#else
inline prolong() { extend(key[my(c)], token[my(c)]) }
#endif

inline release_now(how) {
    let_go(key[my(c)], token[my(c)], how == RETURN);
    printf("worker %d releases key %d: %e\n", _pid, key[my(c)], said)
}

/* It releases the key, and gives the copy back or keeps it in the batch. */
inline fail(how) {
    if
    :: may_send ->
        d_step { send(how); printf("the release of key %d by worker %d is late\n", key[my(c)], _pid) }
    :: may_send ->
        d_step { send(how); printf("the release of key %d by worker %d comes twice\n", key[my(c)], _pid);
                 release_now(how) }
    :: d_step { release_now(how) }
    fi;
    if
    :: d_step { hand_back() }
    :: d_step { claim_again(AGAIN, key[my(c)]) }
    fi
}

inline commit_now() {
    commit(key[my(c)], fence[my(c)]);
    printf("worker %d commits key %d: %e\n", _pid, key[my(c)], said)
}

inline answered() {
    if
    :: said == OK -> d_step { got() }
    :: said == DUPLICATE -> d_step { acknowledge() }
#ifdef OTHER
    :: said == MISMATCH -> d_step { claim_again(WANTED, own_key(c)) }
#endif
    :: said == BUSY -> d_step { hand_back() }
    :: said == BUSY -> d_step { claim_again(AGAIN, key[my(c)]) }
    fi
}

#ifdef FRESH_RESEND
inline redraw() {
    if
    :: phase[my(c)] == UNSURE ->
        draw(); token[my(c)] = new_token; fence[my(c)] = new_generation; quiet()
    :: else
    fi
}
#else
inline redraw() { skip }
#endif

active [WORKERS] proctype worker()
{
    byte c; /* the copy that goes on; 0 again at the end of every step */

end_idle:
    atomic {
        if
        :: is_waiting(0) -> c = 0
        :: is_waiting(1) -> c = 1
#if COPIES > 2
        :: is_waiting(2) -> c = 2
#endif
        fi;
        accept();
        c++;
        do
        :: c < COPIES && is_waiting(c) -> accept(); c++
        :: c < COPIES -> c++
        :: c >= COPIES -> break
        od;
        c = 0
    };

working:
    atomic {
        if
        :: is_active(my(0)) -> c = 0
        :: is_active(my(1)) -> c = 1
#if COPIES > 2
        :: is_active(my(2)) -> c = 2
#endif
        :: (may_ask(0) || may_ask(1)
#if COPIES > 2
            || may_ask(2)
#endif
           ) -> d_step { start_call() }; goto working
        :: crashes > 0 -> d_step { die() }; goto end_idle
        fi;

        if
        :: phase[my(c)] == ASKED || phase[my(c)] == UNSURE ->
            if
            :: d_step { redraw(); ask() };
                answered()
            :: unheard > 0 ->
                d_step {
                    redraw(); ask();
                    unheard--; printf("worker %d does not hear it\n", _pid);
                    phase[my(c)] = UNSURE; quiet()
                }
            :: may_send ->
                d_step {
                    redraw(); send(CLAIM);
                    printf("the claim of key %d by worker %d is late\n", key[my(c)], _pid);
                    phase[my(c)] = UNSURE
                }
            :: phase[my(c)] == UNSURE -> /* it gives up, and releases what it may hold */
                fail(RETURN)
            fi
        :: phase[my(c)] == HELD ->
            if
            :: d_step { deliver(c, has_excuse[my(c)]); phase[my(c)] = ACCEPTED }
            :: unclear > 0 || refusals > 0 ->
                if
                :: unclear > 0 ->
                    d_step {
                        unclear--; printf("worker %d does not hear the sink\n", _pid);
                        deliver(c, true)
                    }
                :: refusals > 0 ->
                    d_step { refusals--; printf("the sink refuses event %d\n", c) }
                fi;
                fail(RELEASE)
            :: unsent > 0 ->
                d_step { unsent--; printf("worker %d does not send event %d\n", _pid, c) };
                fail(RETURN)
            :: !holds[my(c)] -> /* it sees that its lease has ended, before it sends */
                d_step { prolong(); printf("worker %d extends key %d: %e\n", _pid, key[my(c)], said) };
                if
                :: said == OK -> d_step { holds[my(c)] = true; check_holders(); quiet() }
                :: else -> d_step { hand_back() }
                fi
            fi
        :: phase[my(c)] == ACCEPTED ->
            if
            :: may_send -> /* there is no answer in time */
                d_step {
                    send(COMMIT);
                    printf("the commit of key %d by worker %d is late\n", key[my(c)], _pid)
                }
            :: may_send -> /* something on the way repeats it */
                d_step {
                    send(COMMIT); printf("the commit of key %d by worker %d comes twice\n", key[my(c)], _pid);
                    commit_now(); quiet()
                }
            :: d_step { commit_now(); quiet() }
            fi;
            d_step { acknowledge() }
        fi;
        c = 0;
        if
        :: any_of(_pid, is_there) -> goto working
        :: else -> goto end_idle
        fi
    }
}

/* --- time, the source and the network ------------------------------------------------------------ */

#if ITEMS == 2
#define is_held(k) (by(0, k) || by(1, k))
#elif ITEMS == 3
#define is_held(k) (by(0, k) || by(1, k) || by(2, k))
#elif ITEMS == 4
#define is_held(k) (by(0, k) || by(1, k) || by(2, k) || by(3, k))
#else
#define is_held(k) (by(0, k) || by(1, k) || by(2, k) || by(3, k) || by(4, k) || by(5, k))
#endif
#define by(i, k) (holds[i] && key[i] == (k) && owns(k, token[i]))

/* The commit could not be recorded before the lease ended. */
#if DELAYS > 0
#define excuse_late(k) \
    for (at : 0 .. DELAYS - 1) { \
        if \
        :: late_kind[at] == COMMIT && late_key[at] == (k) && late_fence[at] == store[k].generation -> \
            excuse(late_event[at], true, late_excused[at]) \
        :: else \
        fi \
    } \
    at = 0
#else
#define excuse_late(k) skip
#endif

/* The lease of a worker that died or went on. */
#define LEASE_ENDS(k) :: d_step { is_claimed(k) && !is_held(k) -> \
    store[k].live = false; printf("the lease on key %d ends\n", k); excuse_late(k) }

/* The leases of a worker that stands still. */
#define STANDS_STILL(w) :: d_step { stalls > 0 && any_of(w, has_hold) -> \
    stalls--; printf("worker %d stands still until its leases end\n", w); \
    for (slot : its(w, 0) .. its(w, EVENTS - 1)) { \
        if \
        :: has_hold(slot) -> \
            holds[slot] = false; \
            excuse(slot - its(w, 0), phase[slot] == ACCEPTED, has_excuse[slot]); \
            if \
            :: owns(key[slot], token[slot]) -> store[key[slot]].live = false \
            :: else \
            fi \
        :: else \
        fi \
    } \
    slot = 0 }

#define LANDS(i) :: d_step { late_kind[i] != NOTHING -> \
    if \
    :: late_kind[i] == CLAIM -> \
        claim(late_key[i], late_token[i], late_fence[i], hash_of(late_event[i])); \
        printf("the late claim of key %d lands: %e\n", late_key[i], said) \
    :: late_kind[i] == COMMIT -> \
        commit(late_key[i], late_fence[i]); \
        printf("the other commit of key %d lands: %e\n", late_key[i], said) \
    :: else -> \
        let_go(late_key[i], late_token[i], late_kind[i] == RETURN); \
        printf("the other release of key %d lands: %e\n", late_key[i], said) \
    fi; \
    late_kind[i] = NOTHING; late_key[i] = 0; late_token[i] = 0; late_fence[i] = 0; \
    late_event[i] = 0; late_excused[i] = false; quiet() }

active proctype world()
{
end:
    do
    LEASE_ENDS(0)
    LEASE_ENDS(1)
#if KEYS > 2
    LEASE_ENDS(2)
#endif
#if KEYS > 3
    LEASE_ENDS(3)
#endif
    STANDS_STILL(0)
#if WORKERS > 1
    STANDS_STILL(1)
#endif
    COMES_EARLY(0)
    COMES_EARLY(1)
#if COPIES > 2
    COMES_EARLY(2)
#endif
#if DELAYS > 0
    LANDS(0)
#endif
#if DELAYS > 1
    LANDS(1)
#endif
    od
}
