/*
 * What is around the store: a source that brings copies, a sink that takes them, and the
 * faults. A model that includes this has said KEYS, WORKERS, COPIES, EVENTS and
 *
 *   event_of(c)       which event a copy is of
 *   alike(c, d)       whether two copies differ in nothing (else: of one event)
 *   is_published(c)   whether the source has it yet (else: from the start)
 *   is_due(c)         whether the source brings it now, if it waits (else: at any time)
 *   is_safe(e)        whether the event may be acknowledged (else: once it was delivered)
 *
 * Every fault has a budget, and is possible at any moment until that is used up.
 */

#ifndef CRASHES
#define CRASHES 0     /* a worker dies; another starts in its place */
#endif
#ifndef STALLS
#define STALLS 0      /* a lease ends while its holder lives */
#endif
#ifndef EARLY
#define EARLY 0       /* the source brings a copy again that is still in hand */
#endif
#ifndef REFUSALS
#define REFUSALS 0    /* the sink says no */
#endif
#ifndef UNCLEAR
#define UNCLEAR 0     /* the sink takes it, and its yes is not heard */
#endif

#ifndef alike
#define alike(c, d) (event_of(c) == event_of(d))
#endif
#ifndef is_published
#define is_published(c) true
#endif
#ifndef is_due
#define is_due(c) true
#endif
#ifndef is_safe
#define is_safe(e) delivered[e]
#endif

byte crashes = CRASHES, stalls = STALLS, early = EARLY, refusals = REFUSALS, unclear = UNCLEAR;

/* --- the sink, and what excuses a second delivery --------------------------------- */

bool delivered[EVENTS];
byte unexcused[EVENTS];   /* attempts that delivered, and to which nothing happened */
bool has_sent[WORKERS];   /* the attempt of this worker delivered */
bool excused[WORKERS];    /* and something happened to it: its lease ended, it died, ... */

inline deliver(e, is_excused) {
    if
    :: delivered[e] -> printf("the sink takes event %d once more\n", e)
    :: else -> printf("the sink takes event %d\n", e)
    fi;
    check(X1, !delivered[e]);
    delivered[e] = true;
    unexcused[e] = unexcused[e] + (is_excused -> 0 : 1);
    check(I3, unexcused[e] <= 1)
}

/* Something happened to an attempt at e; it counts once. */
#define excuse(e, did_send, flag) \
    unexcused[e] = unexcused[e] - ((did_send) && !flag -> 1 : 0); \
    flag = true

/* --- the source: where a copy is ----------------------------------------------------- */

#define QUEUED  0
#define ACKED   1         /* acknowledged: it never comes again */
#define AT(w)   (2 + (w)) /* in the hand of a worker; of the last that took it, if of several */

byte place[COPIES];

#define is_out(c)     (place[c] >= AT(0))
#define is_waiting(c) (place[c] == QUEUED && is_published(c) && is_due(c))
/* Of copies that are alike it is enough to take the first that waits. */
#define is_first(c)   (is_waiting(c) && !(alike(c, c - 1) && is_waiting(c - 1)))
#define is_at_rest(c) (!is_published(c) || (place[c] == ACKED && is_safe(event_of(c))))
#define is_acked(c, e) (event_of(c) != (e) || place[c] == ACKED)

#if COPIES == 1
#define all_acked(e) is_acked(0, e)
#define is_settled   is_at_rest(0)
#elif COPIES == 2
#define all_acked(e) (is_acked(0, e) && is_acked(1, e))
#define is_settled   (is_at_rest(0) && is_at_rest(1))
#else
#define all_acked(e) (is_acked(0, e) && is_acked(1, e) && is_acked(2, e))
#define is_settled   (is_at_rest(0) && is_at_rest(1) && is_at_rest(2))
#endif

inline take(c) {
    if
    :: is_waiting(0) -> c = 0
#if COPIES > 1
    :: is_first(1) -> c = 1
#endif
#if COPIES > 2
    :: is_first(2) -> c = 2
#endif
    fi;
    place[c] = AT(_pid);
    printf("worker %d takes copy %d, of event %d\n", _pid, c, event_of(c))
}

/* Handed back, or back because its worker died. */
inline later(c) {
    place[c] = (place[c] == AT(_pid) -> QUEUED : place[c]);
    c = 0
}

inline ack(c) {
    printf("worker %d acknowledges copy %d\n", _pid, c);
    check(I4, is_safe(event_of(c)));
    place[c] = ACKED;
    check(I1, !all_acked(event_of(c)) || is_safe(event_of(c)));
    c = 0
}

#define COMES_EARLY(c) :: d_step { early > 0 && is_out(c) -> \
    early--; place[c] = QUEUED; printf("copy %d comes once more\n", c) }

#ifdef LIVE
ltl L { []<> is_settled }
#endif
