/*
 * What people write first. One of
 *
 *   GET_THEN_PUT  look the key up; where it is unknown mark it, then send
 *   MARK_BEFORE   mark it unless it is marked, in one step, then send
 *   MARK_AFTER    look the key up, send, then mark it
 */

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef COPIES
#define COPIES 2
#endif
#define KEYS 1
#define EVENTS 1
#define event_of(c) 0

#include "store.pml"
#include "world.pml"

inline mark() {
    store[0].state = DONE; store[0].live = true;
    printf("worker %d marks the key\n", _pid)
}

inline die() {
    printf("worker %d dies\n", _pid);
    crashes--;
    later(c)
}

#define DIES :: atomic { crashes > 0 -> d_step { die() }; goto end_idle }

active [WORKERS] proctype worker()
{
    byte c; /* the copy in hand */

end_idle:
    atomic { take(c) };

#ifndef MARK_BEFORE
    if
    :: atomic { is_done(0) -> printf("worker %d finds the key\n", _pid); goto known }
    :: atomic { !is_done(0) -> printf("worker %d does not find the key\n", _pid) }
    DIES
    fi;
#endif

#ifdef GET_THEN_PUT
    if
    :: d_step { mark() }
    DIES
    fi;
#endif
#ifdef MARK_BEFORE
    if
    :: atomic { is_done(0) -> printf("worker %d finds the key\n", _pid); goto known }
    :: d_step { !is_done(0) -> mark() }
    DIES
    fi;
#endif

    if
    :: d_step { deliver(0, false); has_sent[_pid] = true }
    :: atomic { refusals > 0 ->
        d_step { refusals--; printf("the sink refuses worker %d\n", _pid); later(c) };
        goto end_idle
      }
    DIES
    fi;

#ifdef MARK_AFTER
    if
    :: d_step { mark() }
    :: atomic { crashes > 0 ->
        d_step {
            excuse(0, has_sent[_pid], excused[_pid]);
            has_sent[_pid] = false; excused[_pid] = false; die()
        };
        goto end_idle
      }
    fi;
#endif
    has_sent[_pid] = false;

known:
    if
    :: atomic { d_step { ack(c) }; goto end_idle }
    DIES
    fi
}

active proctype world()
{
end:
    do
    COMES_EARLY(0)
#if COPIES > 1
    COMES_EARLY(1)
#endif
    od
}
