/*
 * Two tiers: every copy has a transport id and a business key, and goes once by either.
 *
 * Key 0 is the business key, which all copies share. The last copy is a re-emission, with a
 * transport id of its own (key 2); the others have the transport id of key 1.
 *
 * Both keys are claimed in one step; with IN_TURN, one after the other. The commits are two
 * steps, in either order. Switches that break it:
 *   MARK_WHILE_BUSY   (with IN_TURN) the transport id is marked done while the other is claimed
 *   COMMIT_FIRST_ONLY only the transport id is committed
 */

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef COPIES
#define COPIES 2
#endif
#define KEYS 3
#define EVENTS 1
#define event_of(c) 0
#define first_of(c) ((c) == COPIES - 1 -> 2 : 1)
#define alike(c, d) ((c) != COPIES - 1 && (d) != COPIES - 1)

#include "store.pml"
#include "world.pml"

byte token[WORKERS];
byte fence[WORKERS], first_fence[WORKERS]; /* the generations of the two records */

#define stored(field, n) (store[0].field == n || store[1].field == n || store[2].field == n)
#if WORKERS == 2
#define any(field, n) (field[0] == n || field[1] == n)
#define is_held(k)    (owns(k, token[0]) || owns(k, token[1]))
#else
#define any(field, n) (field[0] == n || field[1] == n || field[2] == n)
#define is_held(k)    (owns(k, token[0]) || owns(k, token[1]) || owns(k, token[2]))
#endif
#define is_token(n)      (any(token, n) || stored(token, n))
#define is_generation(n) (any(fence, n) || any(first_fence, n) || stored(generation, n))

#include "names.pml"

inline got(t) {
    token[_pid] = t;
    fence[_pid] = store[0].generation;
    first_fence[_pid] = store[first_of(c)].generation;
    quiet()
}

inline end_attempt() {
    token[_pid] = 0; fence[_pid] = 0; first_fence[_pid] = 0;
    excused[_pid] = false; has_sent[_pid] = false;
    quiet()
}

inline hand_back() { later(c); end_attempt() }

inline die() {
    printf("worker %d dies\n", _pid);
    crashes--;
    hand_back()
}

inline release_first() {
    if
    :: c == COPIES - 1 -> release(2, token[_pid])
    :: else -> release(1, token[_pid])
    fi;
    printf("worker %d releases key %d: %e\n", _pid, first_of(c), said)
}

inline release_both() {
    release_first();
    release(0, token[_pid]);
    printf("worker %d releases key 0: %e\n", _pid, said)
}

inline commit_first() {
    if
    :: c == COPIES - 1 -> commit(2, first_fence[_pid])
    :: else -> commit(1, first_fence[_pid])
    fi;
    printf("worker %d commits key %d: %e\n", _pid, first_of(c), said)
}

inline commit_last() {
    commit(0, fence[_pid]);
    printf("worker %d commits key 0: %e\n", _pid, said)
}

inline remember_first() {
    if
    :: c == COPIES - 1 -> remember(2, new_generation)
    :: else -> remember(1, new_generation)
    fi;
    printf("worker %d remembers key %d: %e\n", _pid, first_of(c), said)
}

inline ask_both() {
    if
    :: c == COPIES - 1 -> claim_both(2, 0, new_token, new_generation)
    :: else -> claim_both(1, 0, new_token, new_generation)
    fi;
    printf("worker %d claims keys %d and 0: %e\n", _pid, first_of(c), said)
}

inline ask_first() {
    if
    :: c == COPIES - 1 -> claim(2, new_token, new_generation, 0)
    :: else -> claim(1, new_token, new_generation, 0)
    fi;
    printf("worker %d claims key %d: %e\n", _pid, first_of(c), said)
}

inline ask_last() {
    claim(0, token[_pid], new_generation, 0);
    printf("worker %d claims key 0: %e\n", _pid, said)
}

#define DIES :: atomic { crashes > 0 -> d_step { die() }; goto end_idle }
#define DIES_AFTER_YES :: atomic { crashes > 0 -> \
    d_step { excuse(0, has_sent[_pid], excused[_pid]); die() }; goto end_idle }

active [WORKERS] proctype worker()
{
    byte c; /* the copy in hand */

end_idle:
    atomic { take(c) };

#ifndef IN_TURN
    if
    :: atomic {
        d_step { roll(); ask_both() };
        if
        :: said == OK -> d_step { got(new_token) }; goto holding
        :: said == DUPLICATE -> d_step { quiet() }; goto duplicate
        :: said == BUSY -> d_step { hand_back() }; goto end_idle
        fi
      }
    DIES
    fi;
#else
    if
    :: atomic {
        d_step { roll(); ask_first() };
        if
        :: said == OK -> d_step { token[_pid] = new_token; quiet() }
        :: said == DUPLICATE -> d_step { quiet() }; goto known
        :: said == BUSY -> d_step { hand_back() }; goto end_idle
        fi
      }
    DIES
    fi;
    if
    :: atomic {
        d_step { roll(); ask_last() };
        if
        :: said == OK -> d_step { got(token[_pid]) }; goto holding
        :: else
        fi;
        d_step { first_fence[_pid] = store[first_of(c)].generation };
        if
        :: said == DUPLICATE -> d_step { commit_first(); end_attempt() }; goto known
#ifdef MARK_WHILE_BUSY
        :: said == BUSY -> d_step { commit_first(); hand_back() }; goto end_idle
#else
        :: said == BUSY -> d_step { release_first(); hand_back() }; goto end_idle
#endif
        fi
      }
    DIES
    fi;
#endif

holding:
    if
    :: atomic { d_step { deliver(0, excused[_pid]); has_sent[_pid] = true }; goto yes }
    :: atomic { refusals > 0 ->
        d_step { refusals--; printf("the sink refuses worker %d\n", _pid); release_both(); hand_back() };
        goto end_idle
      }
    DIES
    fi;

yes:
    if
    :: atomic { d_step { commit_first(); quiet() } }
#ifndef COMMIT_FIRST_ONLY
    :: atomic { d_step { commit_last(); quiet() }; goto half }
#endif
    DIES_AFTER_YES
    fi;
#ifdef COMMIT_FIRST_ONLY
    if
    :: atomic {
        d_step {
            release(0, token[_pid]); printf("worker %d releases key 0: %e\n", _pid, said);
            end_attempt()
        };
        goto known
      }
    DIES_AFTER_YES
    fi;
#else
    if
    :: atomic { d_step { commit_last(); end_attempt() }; goto known }
    DIES_AFTER_YES
    fi;

half:
    if
    :: atomic { d_step { commit_first(); end_attempt() }; goto known }
    DIES
    fi;
#endif

duplicate:
    if
    :: atomic { is_done(0) -> d_step { roll(); remember_first(); quiet() }; goto known }
    :: goto known
    DIES
    fi;

known:
    if
    :: atomic { d_step { ack(c) }; goto end_idle }
    DIES
    fi
}

#define LEASE_ENDS(k) :: d_step { is_claimed(k) && !is_held(k) -> \
    store[k].live = false; printf("the lease on key %d ends\n", k) }

#define STANDS_STILL(w, k) :: d_step { stalls > 0 && is_claimed(k) && owns(k, token[w]) -> \
    stalls--; store[k].live = false; excuse(0, has_sent[w], excused[w]); \
    printf("worker %d stands still until its lease on key %d ends\n", w, k) }

active proctype world()
{
end:
    do
    LEASE_ENDS(0)
    LEASE_ENDS(1)
    LEASE_ENDS(2)
    STANDS_STILL(0, 0)
    STANDS_STILL(0, 1)
    STANDS_STILL(0, 2)
    STANDS_STILL(1, 0)
    STANDS_STILL(1, 1)
    STANDS_STILL(1, 2)
#if WORKERS > 2
    STANDS_STILL(2, 0)
    STANDS_STILL(2, 1)
    STANDS_STILL(2, 2)
#endif
    COMES_EARLY(0)
    COMES_EARLY(1)
#if COPIES > 2
    COMES_EARLY(2)
#endif
    od
}
