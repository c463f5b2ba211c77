/*
 * Newest wins: the register of an entity (key 0) says which version was delivered last.
 *
 * Event 0 is version 1 and event 1 version 2; with EQUAL both are version 2. Each has a key of
 * its own (1 and 2), and the last copy is event 1. The register is held from before the
 * comparison until after the send, raised after the yes and before the event's own commit.
 *
 * FORGETS: the register ends a window after it was last raised. There are three events, of the
 * versions 1 to 3, and one copy of each. Time passes in halves of a window, and only while no
 * lease lasts: a window is longer than any lease.
 *
 * Switches that break it:
 *   COMPARE_THEN_SEND  the register is read and compared, and written after the send, unheld
 *   SET_AT_CLAIM       compared and raised in one step, before the send, and not held
 *   COMMIT_FIRST       the event is committed before the register is raised
 *   DROP_EQUAL         an equal version counts as older
 *   STALE_RENEWS       (with FORGETS) a stale arrival begins the window of the register again
 *   STALE_ENDS         (with FORGETS) a stale arrival ends the register
 *   CLAIM_RENEWS       (with FORGETS) a claim begins the window again, and only the return of the
 *                      register after a stale arrival takes that back
 */

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef COPIES
#define COPIES 2
#endif
#ifdef FORGETS
#define EVENTS 3
#define event_of(c) (c)
#define is_safe(e) (delivered[e] || ((e) < 1 && delivered[1]) || ((e) < 2 && delivered[2]))
#else
#define EVENTS 2
#define event_of(c) ((c) == COPIES - 1)
#define is_safe(e) (delivered[e] || (version_of(e) < 2 && delivered[1]))
#endif
#define KEYS (1 + EVENTS)
#ifdef EQUAL
#define version_of(e) 2
#else
#define version_of(e) (1 + (e))
#endif
#define own(e) (1 + (e))

#include "store.pml"
#include "world.pml"

byte event[WORKERS];
byte token[WORKERS];  /* on the event's own key */
byte fence[WORKERS];
byte hand[WORKERS];   /* the token on the register */

bool ahead[WORKERS];  /* for R1: it delivered, and the register does not say so yet */
byte recorded;        /* the newest version that was delivered, and that the register knows of */
byte latest;          /* for R2: the version that the sink saw last */

#ifdef FORGETS
#define WINDOW 2
byte left;            /* halves of a window until the register ends */
byte since = WINDOW;  /* for R3: halves of a window since it was raised, no more than one window */
#define stored(field, n) (store[0].field == n || store[1].field == n || store[2].field == n \
                       || store[3].field == n)
#else
#define stored(field, n) (store[0].field == n || store[1].field == n || store[2].field == n)
#endif
#if WORKERS == 2
#define any(field, n) (field[0] == n || field[1] == n)
#define is_held(k)    (has(0, k) || has(1, k))
#define none_newer(v) (!newer(0, v) && !newer(1, v))
#else
#define any(field, n) (field[0] == n || field[1] == n || field[2] == n)
#define is_held(k)    (has(0, k) || has(1, k) || has(2, k))
#define none_newer(v) (!newer(0, v) && !newer(1, v) && !newer(2, v))
#endif
#define has(w, k)     (owns(k, hand[w]) || owns(k, token[w]))
#define newer(w, v)   (ahead[w] && !excused[w] && version_of(event[w]) > (v))
#define is_token(n)      (any(token, n) || any(hand, n) || stored(token, n))
#define is_generation(n) (any(fence, n) || stored(generation, n))

#include "names.pml"

#define my_version version_of(event[_pid])
#ifdef DROP_EQUAL
#define is_stale (my_version <= store[0].memo)
#else
#define is_stale (my_version < store[0].memo)
#endif
#define newest(v) ((v) > store[0].memo -> (v) : store[0].memo)

inline end_attempt() {
    event[_pid] = 0; token[_pid] = 0; fence[_pid] = 0; hand[_pid] = 0;
    excused[_pid] = false; has_sent[_pid] = false; ahead[_pid] = false;
    quiet()
}

inline hand_back() { later(c); end_attempt() }

inline die() {
    printf("worker %d dies\n", _pid);
    crashes--;
    hand_back()
}

inline ask_own() {
    claim(own(event[_pid]), new_token, new_generation, 0);
    printf("worker %d claims event %d: %e\n", _pid, event[_pid], said)
}

inline ask_register() {
    claim(0, new_token, new_generation, 0);
#ifdef CLAIM_RENEWS
    left = WINDOW;
#endif
    printf("worker %d claims the register, at version %d: %e\n", _pid, store[0].memo, said)
}

byte new_memo;        /* 0 again at the end of every step */

inline raise_register() {
    new_memo = newest(my_version);
    release_with(0, hand[_pid], new_memo);
    new_memo = 0;
    printf("worker %d raises the register, to version %d: %e\n", _pid, store[0].memo, said)
}

inline write_register() {
    store[0].memo = newest(my_version);
    printf("worker %d writes the register: version %d\n", _pid, store[0].memo)
}

inline raised() {
    recorded = (my_version > recorded -> my_version : recorded);
#ifdef FORGETS
    left = WINDOW; since = 0;
#endif
    ahead[_pid] = false; hand[_pid] = 0;
    quiet()
}

inline return_register() {
    release(0, hand[_pid]);
    printf("worker %d returns the register: %e\n", _pid, said);
#if defined(STALE_RENEWS)
    left = WINDOW;
#elif defined(STALE_ENDS)
    left = 0; store[0].memo = 0;
#elif defined(CLAIM_RENEWS)
    left = WINDOW - since;
#endif
    hand[_pid] = 0;
    quiet()
}

inline commit_own() {
    commit(own(event[_pid]), fence[_pid]);
    printf("worker %d commits event %d: %e\n", _pid, event[_pid], said)
}

inline give_back_all() {
    release(0, hand[_pid]);
    release(own(event[_pid]), token[_pid]);
    printf("worker %d releases both: %e\n", _pid, said);
    hand_back()
}

inline send_it(is_excused) {
    check(R1, is_excused || (my_version >= recorded && none_newer(my_version)));
    deliver(event[_pid], is_excused);
    latest = my_version
}

#define DIES :: atomic { crashes > 0 -> d_step { die() }; goto end_idle }
#define DIES_AFTER_YES :: atomic { crashes > 0 -> \
    d_step { excuse(event[_pid], has_sent[_pid], excused[_pid]); die() }; goto end_idle }

active [WORKERS] proctype worker()
{
    byte c; /* the copy in hand */

end_idle:
    atomic { take(c); event[_pid] = event_of(c) };

    if
    :: atomic {
        d_step { roll(); ask_own() };
        if
        :: said == OK ->
            d_step {
                token[_pid] = new_token; fence[_pid] = store[own(event[_pid])].generation; quiet()
            }
        :: said == DUPLICATE -> d_step { end_attempt() }; goto known
        :: said == BUSY -> d_step { hand_back() }; goto end_idle
        fi
      }
    DIES
    fi;

    if
#if defined(COMPARE_THEN_SEND)
    :: atomic { is_stale -> printf("worker %d finds it stale\n", _pid); goto committing }
    :: atomic { !is_stale -> printf("worker %d compares\n", _pid) }
#elif defined(SET_AT_CLAIM)
    :: atomic { is_stale -> printf("worker %d finds it stale\n", _pid); goto committing }
    :: atomic { !is_stale -> d_step { write_register() } }
#else
    :: atomic { !is_claimed(0) -> /* else it waits, in place */
        d_step { roll(); ask_register(); hand[_pid] = new_token; quiet() };
        if
        :: is_stale ->
            printf("worker %d finds it stale\n", _pid);
#ifdef FORGETS
            check(R3, since < WINDOW);
#endif
            goto stale
        :: !is_stale
        fi
      }
#endif
    DIES
    fi;

    if /* it sends */
    :: atomic {
        d_step { send_it(excused[_pid]); has_sent[_pid] = true; ahead[_pid] = true };
        goto yes
      }
    :: atomic { unclear > 0 ->
        d_step {
            unclear--; printf("worker %d does not hear the sink\n", _pid);
            send_it(true); give_back_all()
        };
        goto end_idle
      }
    :: atomic { refusals > 0 ->
        d_step { refusals--; printf("the sink refuses worker %d\n", _pid); give_back_all() };
        goto end_idle
      }
    DIES
    fi;

yes:
#ifdef COMMIT_FIRST
    if
    :: atomic { d_step { commit_own(); quiet() } }
    DIES_AFTER_YES
    fi;
#endif
raising:
    if
#if defined(COMPARE_THEN_SEND)
    :: atomic { d_step { write_register(); raised() }; goto committing }
#elif defined(SET_AT_CLAIM)
    :: atomic { d_step { raised() }; goto committing }
#else
    :: atomic {
        d_step { raise_register() };
        if
        :: said == OK -> d_step { raised() }; goto committing
        :: said == FENCED -> d_step { hand[_pid] = 0; quiet() }; goto retaking
        fi
      }
#endif
    DIES_AFTER_YES
    fi;

retaking: /* another has the register, and may not know that this version was delivered */
    if
    :: atomic { !is_claimed(0) ->
        d_step { roll(); ask_register(); hand[_pid] = new_token; quiet() };
        goto raising
      }
    DIES_AFTER_YES
    fi;

stale:
    if
    :: atomic { d_step { return_register() } }
    DIES
    fi;

committing:
    if
    :: atomic { d_step { commit_own(); end_attempt() }; goto known }
    DIES_AFTER_YES
    fi;

known:
    if
    :: atomic {
        d_step {
            ack(c);
            check(R2, !(all_acked(0) && all_acked(1)) || latest == 2 || stalls < STALLS)
        };
        goto end_idle
      }
    DIES
    fi
}

#define LEASE_ENDS(k) :: d_step { is_claimed(k) && !is_held(k) -> \
    store[k].live = false; printf("the lease on key %d ends\n", k) }

#define STANDS_STILL(w) :: d_step { stalls > 0 && token[w] != 0 -> \
    stalls--; excuse(event[w], has_sent[w], excused[w]); \
    printf("worker %d stands still until its leases end\n", w); \
    if :: owns(0, hand[w]) -> store[0].live = false :: else fi; \
    if :: owns(own(event[w]), token[w]) -> store[own(event[w])].live = false :: else fi }

#ifdef FORGETS
#define no_lease (!is_claimed(0) && !is_claimed(1) && !is_claimed(2) && !is_claimed(3))
#define PASSES_TIME :: d_step { no_lease && (left > 0 || since < WINDOW) -> \
    left = (left > 0 -> left - 1 : 0); since = (since < WINDOW -> since + 1 : WINDOW); \
    store[0].memo = (left > 0 -> store[0].memo : 0); recorded = (since < WINDOW -> recorded : 0); \
    printf("half a window passes\n") }
#endif

active proctype world()
{
end:
    do
    LEASE_ENDS(0)
    LEASE_ENDS(1)
    LEASE_ENDS(2)
#ifdef FORGETS
    LEASE_ENDS(3)
    PASSES_TIME
#endif
    STANDS_STILL(0)
    STANDS_STILL(1)
#if WORKERS > 2
    STANDS_STILL(2)
#endif
    COMES_EARLY(0)
    COMES_EARLY(1)
#if COPIES > 2
    COMES_EARLY(2)
#endif
    od
}
