/* The order of a key: messages of one key, each in a bundle of its own. Workers claim them without the consumer's lock
 * or with it, acknowledge them or give them back, are too late, roll back and vanish; claims live long, and leases end.
 * Each step is one statement: it sees what is committed when it begins, and what its own transaction did.
 *
 * Spin walks through every order of these steps, and checks that
 *   - no message is claimed before all earlier ones of its key are done;
 *   - no two calls wait for each other, and nothing waits for ever: a last claimer gets all that is not done.
 *
 * FAULT plants a fault that Spin must find. 1: what is behind a bundle that goes back stays assigned. 2: a assigner does not
 * see bundles that are claimed. 3: a bundle is gone when its acknowledgement has begun. 4: messages wait for nothing
 * while one of their key is delayed. 5: a claim that is held for long gets another number.
 */

#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef CALLS
#define CALLS 2               /* claims of each worker */
#endif
#ifndef FAULT
#define FAULT 0
#endif

/* Lanes; assigner: a assign has taken it out of its lane, and stores it again in the same transaction. */
mtype = { line, assigned, held, waiting, delayed, done, assigner };
#define NOBODY 255
#define NOT_FIRST 255         /* place in lane_waiting: another one of the key is the first; or ... */
#define FREE 254              /* ... it may be assigned; else the number of the bundle that has to be gone */

typedef Bundle { mtype lane = line; byte number; byte behind; byte place; byte token }

Bundle now_[MESSAGES];        /* committed */
Bundle own[MESSAGES * (WORKERS + 1)];
byte changed[WORKERS + 1];    /* the bundles that an open transaction has changed, as bits */
byte locked[MESSAGES];        /* by whom */
byte consumer_lock = NOBODY;
byte numbers, tokens;         /* given out */
byte workers_left = WORKERS;

#define LAST (w == WORKERS)
#define IF(condition, action) if :: condition -> action :: else fi
#define MINE(i) own[w * MESSAGES + (i)]
#define IS_MINE(i) ((changed[w] >> (i)) & 1)
#define LANE(i) (IS_MINE(i) -> MINE(i).lane : now_[i].lane)
#define NUMBER(i) (IS_MINE(i) -> MINE(i).number : now_[i].number)
#define BEHIND(i) (IS_MINE(i) -> MINE(i).behind : now_[i].behind)
#define PLACE(i) (IS_MINE(i) -> MINE(i).place : now_[i].place)
#define TOKEN(i) (IS_MINE(i) -> MINE(i).token : now_[i].token)
#define OPEN(i) (LANE(i) == assigned || LANE(i) == held)

/* Takes a bundle's row, to change it. */
inline change(i) {
    if
    :: !IS_MINE(i) ->
        MINE(i).lane = now_[i].lane; MINE(i).number = now_[i].number; MINE(i).behind = now_[i].behind;
        MINE(i).place = now_[i].place; MINE(i).token = now_[i].token;
        changed[w] = changed[w] | (1 << (i)); locked[i] = w
    :: else
    fi
}

/* Whether no bundle has the number `before` any more (_pgqueue.is_deleted): in `gone`. */
inline is_deleted() {
    gone = true; k = 0;
    do
    :: k < MESSAGES ->
        IF(OPEN(k) && NUMBER(k) == before && !(FAULT == 3 && locked[k] != NOBODY && now_[k].token != 0), gone = false);
        k++
    :: else -> k = 0; break
    od
}

/* The last open bundle (_pgqueue.open_tails), assigned or also held: in `tail`. */
inline find_tail(also_held) {
    tail = 0; k = 0;
    do
    :: k < MESSAGES ->
        IF((LANE(k) == assigned || (also_held) && LANE(k) == held) && NUMBER(k) > tail
           && !(FAULT == 2 && TOKEN(k) != 0), tail = NUMBER(k));
        k++
    :: else -> k = 0; break
    od
}

/* Says which bundle that waits is the first of the key, and for what (_pgqueue.mark_firsts). */
inline mark_firsts() {
    find_tail(true);
    found = false; k = 0;     /* a delayed one is the first */
    do
    :: k < MESSAGES -> IF(LANE(k) == delayed && FAULT != 4, found = true); k++
    :: else -> k = 0; break
    od;
    do
    :: k < MESSAGES ->
        if
        :: LANE(k) == waiting ->
            change(k);
            MINE(k).place = (found -> NOT_FIRST : (tail -> tail : FREE)); found = true
        :: else
        fi;
        k++
    :: else -> k = 0; break
    od;
    found = false; tail = 0
}

/* What stands behind a bundle that goes back, or is held for long, waits (_pgqueue.unassign_followers). */
inline unassign_followers() {
    k = 0;
    do
    :: k < MESSAGES ->
        if
        :: (locked[k] == NOBODY || locked[k] == w) && LANE(k) == assigned && !TOKEN(k) && BEHIND(k) != 0 && FAULT != 1 ->
            change(k); MINE(k).lane = waiting; MINE(k).place = NOT_FIRST; MINE(k).behind = 0; MINE(k).number = 0
        :: else
        fi;
        k++
    :: else -> k = 0; break
    od;
    mark_firsts()
}

/* A claimed bundle goes back (_pgqueue.return), as it was assigned (_pgqueue.stays_assigned); or it waits, at once or later
 * (_pgqueue.return_by_key): that is another row. */
inline give_back(i) {
    change(i);
    MINE(i).token = 0;
    if
    :: MINE(i).lane = assigned
    :: MINE(i).number = 0; MINE(i).behind = 0; MINE(i).place = NOT_FIRST;
        if :: MINE(i).lane = waiting :: MINE(i).lane = delayed fi;
        unassign_followers()
    fi
}

inline commit() {
    k = 0;
    do
    :: k < MESSAGES ->
        if
        :: IS_MINE(k) ->
            now_[k].lane = MINE(k).lane; now_[k].number = MINE(k).number; now_[k].behind = MINE(k).behind;
            now_[k].place = MINE(k).place; now_[k].token = MINE(k).token
        :: else
        fi;
        k++
    :: else -> k = 0; break
    od;
    rollback()
}

inline rollback() {
    k = 0;
    do
    :: k < MESSAGES ->
        IF(locked[k] == w, locked[k] = NOBODY);
        MINE(k).lane = line; MINE(k).number = 0; MINE(k).behind = 0; MINE(k).place = 0; MINE(k).token = 0;
        k++
    :: else -> k = 0; break
    od;
    changed[w] = 0;
    IF(consumer_lock == w, consumer_lock = NOBODY)
}

/* Chooses a free bundle: `at`; MESSAGES for none. Others that are locked are passed over, if `skips`. */
inline choose(skips) {
    at = 0;
    do
    :: at < MESSAGES ->
        if
        :: LANE(at) == assigned && TOKEN(at) == 0 && !((skips) && locked[at] != NOBODY && locked[at] != w) ->
            before = BEHIND(at); is_deleted();
            IF(BEHIND(at) == 0 || gone, if :: break :: !LAST -> skip fi)
        :: else
        fi;
        at++
    :: else -> break
    od;
    gone = false
}

inline new_token() { tokens++; change(at); MINE(at).token = tokens; token = tokens }

/* _pgqueue.claim_free, and _pgqueue.claim_without_lock: the bundle is found, and then locked and judged again. */
inline claim_quickly() {
    atomic { choose(false) }
    atomic {
        if
        :: at < MESSAGES && locked[at] == NOBODY && now_[at].lane == assigned && now_[at].token == 0 -> new_token()
        :: else -> at = MESSAGES
        fi
    }
}

/* _pgqueue.claim_locked: work that is due, a assign, and a claim. */
inline claim_locked() {
    atomic { consumer_lock == NOBODY -> consumer_lock = w }
    atomic {                  /* _pgqueue.do_due_work */
        at = 0;
        do
        :: at < MESSAGES ->
            if
            :: now_[at].token != 0 && locked[at] == NOBODY && now_[at].lane == assigned ->
                if
                :: change(at); MINE(at).lane = held; MINE(at).behind = 0;               /* _pgqueue.move_long_claims */
                    IF(FAULT == 5, MINE(at).number = 0);
                    unassign_followers();
                    if :: give_back(at) :: !LAST -> skip fi                             /* _pgqueue.expire */
                :: !LAST -> skip
                fi
            :: now_[at].token != 0 && locked[at] == NOBODY && now_[at].lane == held ->
                if :: give_back(at) :: !LAST -> skip fi
            :: else
            fi;
            at++
        :: else -> break
        od
    }
    atomic {                  /* _pgqueue.end_delays */
        at = 0;
        do
        :: at < MESSAGES ->
            if
            :: LANE(at) == delayed ->
                if
                :: change(at); MINE(at).lane = waiting; MINE(at).place = NOT_FIRST; mark_firsts()
                :: !LAST -> skip
                fi
            :: else
            fi;
            at++
        :: else -> break
        od
    }
    atomic {                  /* _pgqueue.take_waiting, and then _pgqueue.take_unassigned */
        at = 0; heads = false;
        do
        :: at < MESSAGES && LANE(at) == waiting && PLACE(at) != NOT_FIRST ->
            before = PLACE(at); is_deleted();
            heads = (PLACE(at) == FREE || gone);
            break
        :: at < MESSAGES && !(LANE(at) == waiting && PLACE(at) != NOT_FIRST) -> at++
        :: else -> break
        od;
        do
        :: heads && at < MESSAGES ->
            IF(LANE(at) == waiting, change(at); MINE(at).lane = assigner);
            at++;
            if :: !LAST -> break :: skip fi
        :: else -> break
        od;
        gone = false
    }
    atomic {
        at = 0; found = false;
        do
        :: at < MESSAGES -> IF(LANE(at) == waiting || LANE(at) == delayed, found = true); at++
        :: else -> break
        od;
        at = 0;
        do
        :: at < MESSAGES ->
            if
            :: LANE(at) == line ->
                change(at);
                if
                :: found -> MINE(at).lane = waiting; MINE(at).place = NOT_FIRST     /* others of the key wait */
                :: else -> MINE(at).lane = assigner
                fi;
                if :: !LAST -> break :: skip fi
            :: else
            fi;
            at++
        :: else -> break
        od;
        found = false
    }
    atomic {                  /* _pgqueue.store_assigned */
        at = 0; find_tail(false); last = tail; find_tail(true);
        do
        :: at < MESSAGES ->
            if
            :: LANE(at) == assigner ->
                if
                :: last == 0 && tail != 0 -> MINE(at).lane = waiting; MINE(at).place = NOT_FIRST   /* its key is held */
                :: else ->
                    numbers++;
                    MINE(at).lane = assigned; MINE(at).number = numbers; MINE(at).behind = last;
                    last = numbers
                fi
            :: else
            fi;
            at++
        :: else -> break
        od;
        mark_firsts(); last = 0
    }
    atomic { choose(true); IF(at < MESSAGES, new_token()) }
}

inline lock_claim() {
    if
    :: atomic { locked[had] == NOBODY || locked[had] == w ->
        found = (now_[had].token == token);
        IF(found, change(had)) }
    fi
}

proctype Worker(byte w) {
    byte calls, at, had, before, token, tail, last, k;
    bool found, gone, heads;
    do
    :: calls == (LAST -> 3 * MESSAGES : CALLS) -> break
    :: else ->
        calls++;
        if
        :: !LAST -> claim_quickly()
        :: claim_locked()
        fi;
        if
        :: atomic {           /* commit */
            had = at;
            if
            :: had < MESSAGES ->
                at = 0;
                do
                :: at < had -> assert(now_[at].lane == done); at++
                :: else -> break
                od
            :: else
            fi;
            commit()
           }
        :: !LAST -> atomic { rollback(); had = MESSAGES }
        fi;
        if
        :: had == MESSAGES -> skip
        :: had < MESSAGES && !LAST -> skip          /* the worker dies */
        :: had < MESSAGES ->                        /* pgqueue.ack */
            lock_claim();
            if
            :: atomic {
                IF(found, MINE(had).lane = done; MINE(had).token = 0; MINE(had).number = 0; MINE(had).behind = 0);
                commit() }
            :: !LAST -> atomic { rollback() }
            fi
        :: had < MESSAGES && !LAST ->               /* pgqueue.nack */
            atomic { consumer_lock == NOBODY -> consumer_lock = w }
            lock_claim();
            atomic { IF(found, give_back(had)); commit() }
        fi;
        atomic {
            at = 0; had = 0; token = 0; found = false; gone = false; heads = false; tail = 0; last = 0; before = 0
        }
    od;
    workers_left--;
    if
    :: LAST ->
        at = 0;
        do
        :: at < MESSAGES -> assert(now_[at].lane == done); at++
        :: else -> break
        od
    :: else
    fi
}

init {
    byte n;
    atomic {
        n = 0; do :: n < MESSAGES -> locked[n] = NOBODY; n++ :: else -> break od;
        n = 0; do :: n < WORKERS -> run Worker(n); n++ :: else -> break od
    }
    atomic {
        workers_left == 0;
        workers_left = 1;
        run Worker(WORKERS)   /* the last claimer: all leases are over */
    }
}
