/*
 * The store: one record per key, and the operations, each in one atomic step.
 *
 * tests/spec/test_operations.py lets Spin run every operation on every small record and
 * compares with what oncebridge.stores.transitions makes of the same: the two cannot drift apart.
 *
 * Switches that break an operation (nobody but the rows of rows.py sets them):
 *   UNFENCED         commit and release do not look whose record it is
 *   COMMIT_ANY_LIFE  commit looks for a claim, but not of which generation
 *   KEEP_GENERATION  other content on a free key goes on under the old generation
 * and one that is another way, not a mistake:
 *   COMMIT_BY_TOKEN  commit is fenced by the token, as release is
 *
 * A model that says ATTEMPTS has records that count them.
 */

#define ABSENT  0
#define CLAIMED 1 /* held while live; free once not: the lease has ended, or it was released */
#define DONE    2 /* done while live; as good as absent once not, removed or not */

typedef Record {
    byte state;
    bool live;        /* the store's clock is before `until` */
    byte token;       /* 0: nobody's */
    byte generation;
    byte hash;        /* 0: not compared */
    byte memo         /* of a register: the version delivered last */
#ifdef ATTEMPTS
    ; byte attempts
#endif
};

Record store[KEYS];
bool entered[KEYS];   /* for I2 and I5: it became done, and its window lasts */

mtype = { OK, BUSY, DUPLICATE, MISMATCH, ALREADY, FENCED, KNOWN };
mtype said;           /* what the store says; 0 again at the end of every step */

#define is_absent(k)  (store[k].state == ABSENT || (store[k].state == DONE && !store[k].live))
#define is_claimed(k) (store[k].state == CLAIMED && store[k].live)
#define is_free(k)    (store[k].state == CLAIMED && !store[k].live)
#define is_done(k)    (store[k].state == DONE && store[k].live)

#define same(one, other) ((one) == (other) || (one) == 0 || (other) == 0)
#define owns(k, t)       ((t) != 0 && store[k].token == (t))

/* One more statement, where attempts are counted. */
#ifdef ATTEMPTS
#define COUNTS(k, n) ; store[k].attempts = n
/* Whether a claim that was granted is answered HELD: a first attempt, all of it as it was asked. */
#define is_as_asked(k, g) (store[k].attempts == 1 && store[k].generation == (g) && store[k].memo == 0)
#else
#define COUNTS(k, n)
#endif

/* What must hold, by a bit each, so that a row can ask for one of them alone. */
#define I1 1   /* nothing is lost: all copies acknowledged, then delivered */
#define I2 2   /* done is entered once in a window */
#define I3 4   /* of the attempts that delivered, one at most has no excuse */
#define I4 8   /* no copy is acknowledged before its event was delivered */
#define I5 16  /* done is not left before the window ends */
#define I6 32  /* one holder with a lease that lasts, at most */
#define X1 64  /* deliveries <= 1, whatever happens */
#define R1 128 /* no older version after a newer one, but for an excuse */
#define R2 256 /* in the end the newest version is the sink's last, but for a stall */
#define R3 512 /* no version is stale when a window has passed since the register was raised */
#define D1 1024 /* no event that the sink would accept ends in the dead letters */
#define D2 2048 /* one bad event alone does not open the breaker */
#define C1 4096 /* a claim that is sent again is not refused because of the first one */
#ifndef CHECKS
#define CHECKS (I1 + I2 + I3 + I4 + I5 + I6 + R1 + R2)
#endif
#define check(which, what) assert(!(CHECKS & (which)) || (what))

/* Before a record is written; data loss takes the last write back. */
#ifdef LOSSES
Record before;
inline keep(k) {
    before.state = store[k].state; before.live = store[k].live; before.token = store[k].token;
    before.generation = store[k].generation; before.hash = store[k].hash
}
#else
#define keep(k) skip
#endif

inline begin(k, t, g, h) {
    keep(k);
    store[k].state = CLAIMED; store[k].live = true; store[k].token = t;
    store[k].generation = g; store[k].hash = h; store[k].memo = 0
    COUNTS(k, 1)
}

inline take_over(k, t, h) {
    keep(k);
    store[k].live = true; store[k].token = t;
    store[k].hash = (store[k].hash == 0 -> h : store[k].hash)
    COUNTS(k, store[k].attempts + 1)
}

inline finish(k) {
    check(I2, !entered[k]);
    keep(k);
    store[k].state = DONE; store[k].live = true; store[k].token = 0;
    entered[k] = true
}

inline claim(k, t, g, h) {
    if
    :: owns(k, t) -> said = OK /* our own earlier request got through */
    :: else ->
        if
        :: is_absent(k) -> begin(k, t, g, h); said = OK
        :: is_free(k) && same(store[k].hash, h) -> take_over(k, t, h); said = OK
        :: is_free(k) && !same(store[k].hash, h) ->
#ifdef KEEP_GENERATION
            store[k].hash = 0; take_over(k, t, h);
#else
            begin(k, t, g, h);
#endif
            said = OK
        :: is_claimed(k) -> said = BUSY
        :: is_done(k) && same(store[k].hash, h) -> said = DUPLICATE
        :: is_done(k) && !same(store[k].hash, h) -> said = MISMATCH
        fi
    fi
}

/* All of several keys, or none; the last identifies the event. */
inline claim_both(first, last, t, g) {
    if
    :: is_done(last) -> said = DUPLICATE
    :: !is_done(last) && ((is_claimed(first) && !owns(first, t))
                       || (is_claimed(last) && !owns(last, t))) -> said = BUSY
    :: else ->
        if
        :: is_done(first) -> said = DUPLICATE
        :: else -> claim(first, t, g, 0); claim(last, t, g, 0)
        fi
    fi
}

#if defined(UNFENCED)
#define may_commit(k, fence) true
#elif defined(COMMIT_ANY_LIFE)
#define may_commit(k, fence) (store[k].state == CLAIMED)
#elif defined(COMMIT_BY_TOKEN)
#define may_commit(k, fence) owns(k, fence)
#else
#define may_commit(k, fence) (store[k].state == CLAIMED && store[k].generation == (fence))
#endif

inline commit(k, fence) {
    if
    :: may_commit(k, fence) -> finish(k); said = OK
    :: else ->
        said = (store[k].state == DONE && store[k].generation == (fence) -> ALREADY : FENCED)
    fi
}

#ifdef UNFENCED
#define may_release(k, t) true
#else
#define may_release(k, t) owns(k, t)
#endif

inline release(k, t) {
    if
    :: may_release(k, t) ->
        keep(k);
        store[k].state = CLAIMED; store[k].live = false; store[k].token = 0;
        check(I5, !entered[k]);
        said = OK
    :: else -> said = FENCED
    fi
}

#ifdef ATTEMPTS
/* Nothing was sent, so the attempt does not count. The generation stays. */
inline release_unsent(k, t) {
    release(k, t);
    if
    :: said == OK && store[k].attempts > 0 -> store[k].attempts--
    :: else
    fi
}
#endif

inline release_with(k, t, m) {
    release(k, t);
    if
    :: said == OK -> store[k].memo = m
    :: else
    fi
}

inline extend(k, t) {
    if
    :: owns(k, t) -> store[k].live = true; said = OK
    :: else -> said = FENCED
    fi
}

inline remember(k, g) {
    if
    :: is_claimed(k) || is_done(k) -> said = KNOWN
    :: else ->
        store[k].generation = (is_free(k) -> store[k].generation : g);
        store[k].hash = 0; store[k].memo = 0
        COUNTS(k, (is_free(k) -> store[k].attempts : 0));
        finish(k);
        said = OK
    fi
}
