/*
 * What the sink's answer means: this event's fault, or trouble of the sink.
 *
 * Every event has one copy and is claimed when it is taken; claims, leases and duplicates are in
 * the other models. Here it is which answers count as an attempt, and when an event ends in the
 * dead letters. An attempt is counted at the claim and taken back by an uncounted release.
 *
 * The sink throttles (429); it is closed (401, 403, 404, 407) or unwell (502, 503, 504) to all
 * events for a while; or it is so to event 0 for ever. FORBIDDEN: event 0 is always answered
 * "closed". POISON: event 0 is always answered "unwell". An unwell sink may have accepted the
 * event.
 *
 * "Throttled" never counts. "Closed" and "unwell" count if another event passed since the last
 * such answer to this one; after give_up_after they end the event. The breaker opens if two
 * events in a row are answered so. Another event is tried first, if there is one.
 *
 * ORDERED: event 1 is brought when event 0 is acknowledged.
 * STREAM: when event 1 is acknowledged, another event is published in its place.
 *
 * Switches that break it:
 *   COUNT_THROTTLED   "throttled" is an attempt
 *   COUNT_ALL         "closed" and "unwell" are always an attempt
 *   COUNT_NONE        "closed" and "unwell" are never an attempt: the breaker opens at once
 *   NO_AGE            no event is given up for its age
 *   UNWELL_IS_NO      "unwell" is taken to mean that the sink did not accept the event
 */

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef COPIES
#define COPIES 2
#elif COPIES != 2
#error "this model has two copies"
#endif
#define EVENTS 2
#define event_of(c) (c)
#ifndef TROUBLES
#define TROUBLES 0    /* the sink is closed or unwell to all events for a while */
#endif
#ifndef THROTTLES
#define THROTTLES 0   /* the sink throttles an event */
#endif
#define KEYS 1        /* not looked at */
#define MOST 3        /* attempts */

bool is_dead[EVENTS];
#define is_safe(e) (delivered[e] || is_dead[e])

bool is_open;         /* the breaker: one event at a time is tried */
bool must_wait[EVENTS]; /* it failed, and another event has not been tried since */
#define is_tried(c)  (place[c] >= AT(0))
#define is_let_in(c) (!is_open || !is_tried(1 - (c)))
#ifdef ORDERED
#define is_due(c) (is_let_in(c) && ((c) == 0 || place[0] == ACKED))
#else
#define is_due(c) (is_let_in(c) && !(must_wait[c] && place[1 - (c)] == QUEUED))
#endif

#include "store.pml"
#include "world.pml"

byte troubles = TROUBLES, throttles = THROTTLES;

#define NONE 0
mtype = { CLOSED, UNWELL };
mtype trouble;        /* what the sink answers all events */
#if defined(FORBIDDEN)
#define is_bad(e) ((e) == 0)
#define bad       CLOSED
#elif defined(POISON)
#define is_bad(e) ((e) == 0)
#define bad       UNWELL
#else
#define is_bad(e) false
#define bad       NONE
#endif
#define answer(e) (is_bad(e) -> bad : trouble)

byte attempts[EVENTS];
bool has_failed[EVENTS]; /* it was answered "closed" or "unwell" */
bool passed[EVENTS];     /* and another event passed since */
bool is_old[EVENTS];     /* give_up_after is over */
byte suspect;            /* the event that was answered so last, if none passed since; from 1 */
bool was_trouble;        /* for D2: all events were answered so, and none passed since */

#if defined(COUNT_ALL)
#define counts(e) true
#elif defined(COUNT_NONE)
#define counts(e) false
#else
#define counts(e) passed[e]
#endif
#ifdef COUNT_NONE
#define opens(e) true
#else
#define opens(e) (!passed[e] && suspect != 0 && suspect != (e) + 1)
#endif

inline pass(e) {
    suspect = 0; is_open = false; was_trouble = false;
    passed[1 - (e)] = has_failed[1 - (e)];
    must_wait[0] = false; must_wait[1] = false
}

inline give_back(is_attempt) {
    attempts[c] = attempts[c] - (is_attempt -> 0 : 1);
    excused[_pid] = false; has_sent[_pid] = false;
    later(c)
}

inline die() {
    printf("worker %d dies\n", _pid);
    crashes--;
    give_back(true)
}

/* "Closed" or "unwell". */
inline fail(e) {
    if
    :: !is_open && opens(e) ->
        is_open = true; printf("the breaker opens\n");
        check(D2, was_trouble || trouble != NONE)
    :: else
    fi;
    was_trouble = was_trouble || trouble != NONE;
    suspect = (e) + 1; has_failed[e] = true;
    must_wait[e] = true; must_wait[1 - (e)] = false
}

inline clear(e) {
    attempts[e] = 0; has_failed[e] = false; passed[e] = false; is_old[e] = false;
    must_wait[e] = false; suspect = (suspect == (e) + 1 -> 0 : suspect)
}

#define DIES :: atomic { crashes > 0 -> d_step { die() }; goto end_idle }

active [WORKERS] proctype worker()
{
    byte c; /* the copy in hand, and the event */

end_idle:
    atomic {
        take(c);
        attempts[c]++;
        if
        :: attempts[c] > MOST -> goto burying
        :: else
        fi
    };

    if
    :: atomic { answer(c) == NONE ->
        d_step { deliver(c, false); has_sent[_pid] = true; pass(c) };
        goto yes
      }
    :: atomic { answer(c) != NONE ->
        d_step {
            printf("worker %d sends event %d: %e\n", _pid, c, answer(c));
            fail(c)
        };
        if
        :: answer(c) == UNWELL && unclear > 0 ->
#ifdef UNWELL_IS_NO
            d_step { unclear--; deliver(c, false) }
#else
            d_step { unclear--; deliver(c, true) }
#endif
        :: true
        fi;
        if
        :: is_old[c] -> printf("event %d is given up for its age\n", c); goto burying
        :: else ->
            d_step { give_back(counts(c)); passed[c] = false };
            goto end_idle
        fi
      }
    :: atomic { throttles > 0 ->
        d_step {
            throttles--; printf("the sink throttles event %d\n", c);
#ifdef COUNT_THROTTLED
            give_back(true)
#else
            give_back(false)
#endif
        };
        goto end_idle
      }
    :: atomic { refusals > 0 ->
        d_step { refusals--; printf("the sink refuses event %d\n", c); give_back(true) };
        goto end_idle
      }
    DIES
    fi;

burying:
    if
    :: d_step {
        printf("event %d goes to the dead letters\n", c);
        is_dead[c] = true; check(D1, is_bad(c))
      }
    DIES
    fi;

yes:
    if
    :: atomic {
        d_step { clear(c); has_sent[_pid] = false; excused[_pid] = false; ack(c) };
        goto end_idle
      }
    :: atomic { crashes > 0 ->
        d_step { excuse(c, has_sent[_pid], excused[_pid]); die() };
        goto end_idle
      }
    fi
}

#ifdef NO_AGE
#define AGES(e)
#else
/* It is longer than any trouble of the sink. */
#define AGES(e) :: d_step { has_failed[e] && !is_old[e] && trouble == NONE -> \
    is_old[e] = true; printf("event %d is old\n", e) }
#endif

#define BEGINS(what) :: d_step { troubles > 0 && trouble == NONE && !is_old[0] && !is_old[1] -> \
    troubles--; trouble = what; printf("the sink answers all events: %e\n", trouble) }

active proctype world()
{
end:
    do
    AGES(0)
    AGES(1)
    BEGINS(CLOSED)
    BEGINS(UNWELL)
    :: d_step { trouble != NONE -> trouble = NONE; printf("the sink accepts events again\n") }
#ifdef STREAM
    :: d_step { place[1] == ACKED && (place[0] != QUEUED || must_wait[0]) ->
        place[1] = QUEUED; delivered[1] = false; unexcused[1] = 0; is_dead[1] = false;
        printf("another event is published, as event 1\n") }
#endif
    od
}
