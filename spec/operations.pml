/*
 * Every operation on every small record, printed: what tests/spec/test_operations.py compares
 * with oncebridge.stores.transitions. Nothing is searched here; Spin runs it through once.
 */

#define KEYS 2
#define CHECKS 0
#define ATTEMPTS

#include "store.pml"

byte state, live, token, generation, hash, attempts; /* the record before */
byte memo = 7;
byte t, h; /* what is asked; the generation is 3, and the memo is none */
byte two;  /* the other record, where there are two */

inline put(k, s, l, tk, g, hs) {
    store[k].state = s; store[k].live = l; store[k].token = tk; store[k].generation = g;
    store[k].hash = hs; store[k].memo = (s == ABSENT -> 0 : memo);
    store[k].attempts = (s == ABSENT -> 0 : attempts);
    entered[k] = false
}

inline told(k) {
    printf(" %d %d %d %d %d %d %d", store[k].state, store[k].live, store[k].token,
        store[k].generation, store[k].hash, store[k].memo, store[k].attempts)
}

inline before(one, other) {
    put(0, state, live, token, generation, hash);
    printf(" %d %d", one, other);
    told(0)
}

inline after() {
    printf(" > %e", said);
    told(0);
    printf("\n")
}

inline after_claim() {
    if
    :: said == OK && is_as_asked(0, 3) -> printf(" > HELD"); told(0); printf("\n")
    :: else -> after()
    fi
}

inline each_operation() {
    for (t : 1 .. 2) {
        for (h : 0 .. 2) {
            printf("claim"); before(t, h); claim(0, t, 3, h); after_claim()
        }
        printf("commit"); before(t, 0); commit(0, t); after();
        printf("release"); before(t, 0); release(0, t); after();
        printf("unsent"); before(t, 0); release_unsent(0, t); after();
        printf("raise"); before(t, 9); release_with(0, t, 9); after();
        printf("extend"); before(t, 0); extend(0, t); after()
    }
    printf("remember"); before(3, 0); remember(0, 3); after()
}

/* With a second record beside it, of all states and two owners; contents are not compared. */
inline each_pair() {
    for (two : 0 .. 6) {
        put(0, state, live, token, generation, 0);
        if
        :: two == 0 -> put(1, ABSENT, 0, 0, 0, 0)
        :: two == 1 -> put(1, CLAIMED, 1, 1, 1, 0)
        :: two == 2 -> put(1, CLAIMED, 1, 2, 1, 0)
        :: two == 3 -> put(1, CLAIMED, 0, 1, 1, 0)
        :: two == 4 -> put(1, CLAIMED, 0, 2, 1, 0)
        :: two == 5 -> put(1, DONE, 1, 0, 1, 0)
        :: two == 6 -> put(1, DONE, 0, 0, 1, 0)
        fi;
        printf("both 1 0"); told(0); told(1);
        claim_both(0, 1, 1, 3);
        printf(" > %e", said); told(0); told(1); printf("\n")
    }
}

init {
    each_operation(); /* on nothing */
    each_pair();
    for (state : CLAIMED .. DONE) {
        for (live : 0 .. 1) {
            for (token : 0 .. (state == DONE -> 0 : 2)) {
                for (generation : 1 .. 3) {
                    for (attempts : 0 .. 2) {
                        for (hash : 0 .. 2) {
                            each_operation();
                            memo = 0; each_operation(); memo = 7
                        }
                        hash = 0;
                        each_pair()
                    }
                }
            }
        }
    }
}
