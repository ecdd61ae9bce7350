/* Publications, gaps and offsets: producers publish, consumers take, a reader without a consumer reads on from an
 * offset, and the server crashes with the tail of its log lost. Each step is one access to what the sessions share:
 * a lock, a sequence, a snapshot, a commit. A comment names the SQL function whose step it is.
 *
 * Spin walks through every order of these steps, and checks that
 *   - a consumer gets each committed publication once, and the publications of a producer in their order;
 *   - so does the reader, whose offset outlives the server, and no crash takes back what the offset says was read;
 *   - gaps close: a few takes after the last producer has ended, no consumer has a gap, and none misses a publication.
 *
 * Sets are bit masks: of publication ids (bit = id), and of transactions. FAULT plants a fault that Spin must find.
 */

#ifndef ROUNDS
#define ROUNDS 2              /* transactions of the first producer, one after the other; the others have one each */
#endif
#ifndef PRODUCERS
#define PRODUCERS 3
#endif
#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#ifndef READERS
#define READERS 0             /* 1: a reader with an offset */
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#ifndef LIMIT
#define LIMIT 7               /* limit_take(): publications of one take */
#endif
#ifndef UNSEEN
#define UNSEEN 2              /* limit_unseen() */
#endif
#ifndef FAULT
#define FAULT 0
#endif

#define LAST_ID     (PRODUCERS - 1 + ROUNDS)
#define BIT(n)      (1 << (n))
#define TX(p, r)    BIT((p) == 0 -> (r) : ROUNDS - 1 + (p))
#define BELOW(id)   (BIT(id) - 1)
#define GAPS        2         /* limit_gaps(): more are merged */
#define TAKES       6         /* after the last producer: so many takes close all gaps */

typedef Cursor {
    byte next = 1;            /* next_publication */
    byte ids[GAPS];           /* consumer_gaps: publication_ids, publishers, look */
    byte who[GAPS];
    bool look[GAPS];
    byte got                  /* transactions whose publication the consumer has taken */
}

/* What the server has in memory, and what a crash leaves of it. */
typedef Database {
    byte issued;              /* the last publication id that the sequence gave out */
    byte visible;             /* publications that a new snapshot sees */
    byte committed;           /* their transactions */
    byte by[LAST_ID + 1];     /* the transaction of each id */
    Cursor cursor[CONSUMERS + 1]    /* the last is nobody's: an array has an element */
}

Database now_, flushed;
byte holders;                 /* transactions that hold the stream's publish lock */
byte epoch;                   /* server starts: a session of an earlier one is lost */
byte producers_left = PRODUCERS;
byte named;                   /* the last of the producers that are alike which took an id */
bool crashes_left = (CRASHES > 0);

/* The offset of the reader, in a checkpoint outside of the database (reading/offsets.sql). */
byte offset_next = 1, old_ids, old_who, new_ids, new_who;
byte offset_got;              /* transactions whose publication it has read */

#define IF(condition, action) if :: condition -> action :: else fi
#define MINE now_.cursor[c]
#define STEP(action) if :: atomic { epoch == mine -> action } :: epoch != mine -> goto lost fi

inline copy(from, to) {
    to.issued = from.issued; to.visible = from.visible; to.committed = from.committed;
    for (i : 0 .. LAST_ID) { to.by[i] = from.by[i] }
    for (i : 0 .. CONSUMERS) {
        to.cursor[i].next = from.cursor[i].next; to.cursor[i].got = from.cursor[i].got;
        for (k : 0 .. GAPS - 1) {
            to.cursor[i].ids[k] = from.cursor[i].ids[k]; to.cursor[i].who[k] = from.cursor[i].who[k];
            to.cursor[i].look[k] = from.cursor[i].look[k]
        }
    }
    i = 0; k = 0
}

/* The first `most` publications of a set, and how many these are. */
inline first_of(set, most, found, count) {
    found = 0; count = 0;
    for (i : 1 .. LAST_ID) {
        if :: count < most && ((set) & BIT(i)) -> found = found | BIT(i); count++ :: else fi
    }
    i = 0
}

/* The transactions of publications. */
inline of_ids(set, transactions) {
    transactions = 0;
    for (i : 1 .. LAST_ID) { if :: (set) & BIT(i) -> transactions = transactions | now_.by[i] :: else fi }
    i = 0
}

inline highest(set, id) {
    id = 0;
    for (i : 1 .. LAST_ID) { if :: (set) & BIT(i) -> id = i :: else fi }
    i = 0
}

/* Nothing comes twice, and no publication of a producer before an earlier one of the same producer. */
inline check_delivery(had, more) {
    assert(!(had & more));
    for (i : 1 .. ROUNDS - 1) {
        assert(!((more) & TX(0, i)) || !(now_.committed & ~(had | more) & TX(0, i - 1)))
    }
    i = 0
}

/* A producer: each transaction publishes once, and is committed or rolled back. All but the first producer are alike:
 * so they take their ids in the order of their names. */
proctype Producer(byte p) {
    byte round, id, mine, me;
    do
    :: round == (p == 0 -> ROUNDS : 1) -> break
    :: else ->
        me = TX(p, round);
        atomic {                                            /* _pgqueue.lock_publish */
            p < 2 || named == p - 1;
            mine = epoch;
            if :: FAULT != 4 -> holders = holders | me :: else fi
        }
        STEP(now_.issued++; id = now_.issued; now_.by[id] = me; IF(p > 0, named = p));  /* nextval, in _pgqueue.publish */
        if :: FAULT == 4 -> STEP(holders = holders | me) :: else fi;
        if
        :: FAULT != 5 ->                                    /* commit: visible first, and then without locks */
            STEP(now_.visible = now_.visible | BIT(id); now_.committed = now_.committed | me);
            STEP(holders = holders & ~me)
        :: FAULT == 5 ->
            STEP(holders = holders & ~me);
            STEP(now_.visible = now_.visible | BIT(id); now_.committed = now_.committed | me)
        :: STEP(holders = holders & ~me; now_.by[id] = 0)   /* rollback */
        fi;
lost:   atomic { round++; id = 0; me = 0; mine = 0; IF(p > 0, named = p) }
    od;
    producers_left--
}

/* _pgqueue.read_new */
inline select_gaps() {
    d_step {
        for (k : 0 .. GAPS - 1) { looked[k] = MINE.ids[k] && (MINE.look[k] || (MINE.who[k] & ~holders)) }
        k = 0
    }
}

/* A consumer: the session with the consumer's lock takes again and again. */
proctype Consumer(byte c) {
    byte mine, before, snapshot, issued, end, holes;
    byte held, beyond, in_gaps, taken, more, i, k, calls;
    bool cut, looked[GAPS];
    do
    :: calls == TAKES -> break
    :: else ->
        atomic {
            mine = epoch;
            IF(producers_left == 0 && !crashes_left, calls++);
            /* _pgqueue.take_plain: publications without a hole between them, while there is no gap */
            if :: MINE.ids[0] || MINE.ids[1] -> goto look :: else fi;
            d_step {
                snapshot = now_.visible & ~BELOW(MINE.next) & BELOW(MINE.next + LIMIT);
                highest(snapshot, end)
            }
            if :: snapshot == 0 || snapshot != (BELOW(end + 1) & ~BELOW(MINE.next)) -> goto look :: else fi;
            taken = snapshot; snapshot = 0
        }
        /* is more visible further on? */
        STEP(if :: now_.visible & ~BELOW(MINE.next + LIMIT) -> taken = 0; end = 0; goto look :: else -> goto commit fi);
look:
        /* _pgqueue.take_all: the publishers before the look, where there are gaps; then the last id; then the look */
        atomic { snapshot = 0; end = 0; if :: MINE.ids[0] || MINE.ids[1] -> skip :: else -> goto looks fi }
        STEP(before = holders & (MINE.who[0] | MINE.who[1]));      /* the others are in no gap */
looks:  STEP(IF(now_.issued + 1 >= MINE.next + UNSEEN, issued = now_.issued));
        if :: FAULT == 1 -> STEP(select_gaps()) :: else fi;
        STEP(                                               /* _pgqueue.read_new: one statement, one snapshot */
            snapshot = now_.visible & (MINE.ids[0] | MINE.ids[1] | ~BELOW(MINE.next));
            if :: MINE.ids[0] || MINE.ids[1] -> skip :: else -> goto found fi);
        if :: FAULT != 1 -> STEP(select_gaps()) :: else fi;
        if :: FAULT == 2 -> STEP(before = holders & (MINE.who[0] | MINE.who[1])) :: else fi;
found:  skip;
        d_step {
            for (k : 0 .. GAPS - 1) { IF(looked[k], held = held | MINE.ids[k]) }
            first_of(snapshot & held, LIMIT, taken, in_gaps);
            if :: in_gaps < LIMIT -> first_of(snapshot & ~BELOW(MINE.next), LIMIT, beyond, more) :: else fi;
            cut = in_gaps >= LIMIT;
            taken = taken | beyond;
            highest(beyond, end);
            /* ids in a row that are not visible become a gap */
            IF(!cut && more < LIMIT && issued + 1 >= UNSEEN + (end -> end + 1 : MINE.next), end = issued);
            IF(end >= MINE.next, holes = BELOW(end + 1) & ~BELOW(MINE.next) & ~taken);
            held = 0; beyond = 0; in_gaps = 0; more = 0; snapshot = 0; issued = 0; k = 0
        }
commit:
        if
        :: STEP(                                            /* _pgqueue.record_gap: with the publishers after the look */
           d_step {
            of_ids(taken, more);
            check_delivery(MINE.got, more);
            MINE.got = MINE.got | more;
            for (k : 0 .. GAPS - 1) {                       /* _pgqueue.shrink_gaps */
                if
                :: looked[k] ->
                    MINE.ids[k] = MINE.ids[k] & ~taken;
                    IF(!cut, MINE.who[k] = MINE.who[k] & before);
                    MINE.look[k] = cut;
                    if
                    :: !MINE.ids[k] || (!cut && !MINE.who[k]) ->
                        MINE.ids[k] = 0; MINE.who[k] = 0; MINE.look[k] = false
                    :: else
                    fi
                :: else
                fi
            }
            IF(end >= MINE.next, MINE.next = end + 1);
            if
            :: holes ->
                k = 1;
                if
                :: !MINE.ids[0] -> k = 0
                :: MINE.ids[0] && MINE.ids[1] ->            /* _pgqueue.merge_gaps */
                    MINE.ids[0] = MINE.ids[0] | MINE.ids[1];
                    MINE.who[0] = MINE.who[0] | MINE.who[1];
                    MINE.look[0] = MINE.look[0] || MINE.look[1]
                :: else
                fi;
                MINE.ids[k] = holes; MINE.who[k] = holders; MINE.look[k] = (FAULT != 3)
            :: else
            fi;
            /* the gaps in one order */
            if
            :: !MINE.ids[0] && MINE.ids[1] ->
                MINE.ids[0] = MINE.ids[1]; MINE.who[0] = MINE.who[1]; MINE.look[0] = MINE.look[1];
                MINE.ids[1] = 0; MINE.who[1] = 0; MINE.look[1] = false
            :: else
            fi
           })
        :: calls == 0 -> skip                               /* rollback: the cursor stays as it was */
        fi;
lost:   atomic {
            before = 0; snapshot = 0; issued = 0; end = 0; holes = 0; taken = 0; more = 0; cut = false;
            i = 0; k = 0; looked[0] = false; looked[1] = false; mine = 0
        }
    od;
    assert(MINE.got == now_.committed);
    assert(!MINE.ids[0] && !MINE.ids[1])
}

/* Reads on from the offset (reading/reading.sql). Nothing is written, but for the checkpoint. */
proctype Reader() {
    byte mine, who, upto, seen, read, end, holes, more, i, k, calls;
    byte next, ids, publishers, ids2, publishers2;
    do
    :: calls == TAKES -> break
    :: else ->
        atomic {
            mine = epoch;
            if :: producers_left == 0 && !crashes_left -> calls++ :: else fi
        }
        /* _pgqueue.advance_offset: the last id, and after it the publishers */
        if :: FAULT == 7 -> STEP(who = holders) :: else fi;
        STEP(upto = now_.issued);
        if :: FAULT != 7 -> STEP(who = holders) :: else fi;
        next = offset_next;
        ids = old_ids; publishers = old_who; ids2 = new_ids; publishers2 = new_who;
        read = 0;
        if
        :: ids ->
            STEP(read = (ids | ids2) & now_.visible & BELOW(upto + 1));        /* scan_publications, in the gaps */
            d_step {                                        /* _pgqueue.close_gaps */
                ids = ids & ~read; ids2 = ids2 & ~read;
                publishers = publishers & who; publishers2 = publishers2 & who;
                if :: !publishers -> ids = 0 :: else fi;
                if :: !publishers2 -> ids2 = 0 :: else fi;
                if :: !ids -> ids = ids2; publishers = publishers2; ids2 = 0 :: else fi;
                if :: !ids2 -> publishers2 = 0 :: else fi;
                if :: !ids -> publishers = 0 :: else fi
            }
        :: else
        fi;
        STEP(seen = now_.visible & ~BELOW(next) & BELOW(upto + 1));            /* _pgqueue.advance_next */
        d_step {
            highest(seen, end);
            holes = 0;
            if :: seen && who -> holes = BELOW(end + 1) & ~BELOW(next) & ~seen :: else fi;
            if
            :: holes && !ids -> ids = holes; publishers = who
            :: holes && ids -> ids2 = ids2 | holes; publishers2 = who
            :: else
            fi;
            if :: seen -> next = end + 1 :: else fi;
            read = read | seen;
            of_ids(read, more)
        }
        /* _pgqueue.durable_offset */
        if
        :: FAULT != 6 && (read || ids != old_ids || publishers != old_who || ids2 != new_ids || publishers2 != new_who)
           -> STEP(d_step { copy(now_, flushed) })
        :: else
        fi;
        d_step {                                            /* the checkpoint */
            check_delivery(offset_got, more);
            offset_got = offset_got | more; offset_next = next;
            old_ids = ids; old_who = publishers; new_ids = ids2; new_who = publishers2
        }
lost:   skip;
        d_step {
            who = 0; upto = 0; seen = 0; read = 0; end = 0; holes = 0; more = 0; i = 0; k = 0;
            next = 0; ids = 0; publishers = 0; ids2 = 0; publishers2 = 0
        }
    od;
    assert(offset_got == now_.committed)
}

/* The server: its log reaches the disk at some time, and a crash forgets the rest (synchronous_commit = off). */
proctype Server() {
    byte i, k;
    if
    :: atomic { d_step { copy(now_, flushed) } }
    :: skip
    fi;
    if
    :: atomic {
        d_step {
            copy(flushed, now_);
            holders = 0; epoch++;
            assert(!(offset_got & ~now_.committed));
            assert(offset_next <= now_.issued + 1)
        }
       }
    :: skip
    fi;
    crashes_left = false
}

init {
    byte n;
    atomic {
        for (n : 0 .. PRODUCERS - 1) { run Producer(n) }
        n = 0;
        do :: n < CONSUMERS -> run Consumer(n); n++ :: else -> break od;
        IF(READERS, run Reader());
        IF(CRASHES, run Server())
    }
}
