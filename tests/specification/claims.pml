/* A message and its claims: workers claim it, acknowledge it or give it back, come too late, roll back and vanish;
 * leases end; and the server crashes with the tail of its log lost. Each step is one statement: what it waits for, and
 * what it then finds, by the rules of read committed.
 *
 * Spin walks through every order of these steps, and checks that
 *   - no worker gets the message while another worker's lease runs, or after it was acknowledged;
 *   - only the claim that holds the message settles it, and that claim can, as long as nobody has taken it over;
 *   - no two calls wait for each other, and the message is never lost: a last claimer gets it, unless it is done.
 *
 * FAULT plants a fault that Spin must find.
 */

#ifndef WORKERS
#define WORKERS 3
#endif
#ifndef CALLS
#define CALLS 2               /* claims of each worker */
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#ifndef FAULT
#define FAULT 0
#endif

mtype = { line, slot, claimed, done };  /* a ready run; a slot; a claimed run with a row of claims; in no table */
#define NOBODY 255

typedef Message {
    mtype place = line;
    byte  slot_no;            /* slots.slot: which slot it was cut into */
    byte  token;              /* 0: nobody has claimed it */
    byte  told = NOBODY       /* the worker that got the token */
}

Message now_, flushed;        /* committed; and what a crash leaves of it */
Message own[WORKERS + 1];     /* what an open transaction has made of it: seen by others when it is committed */
byte row_lock = NOBODY;       /* who has locked its row of slots or of consumer_messages */
byte claim_lock = NOBODY;     /* its row of claims */
byte consumer_lock = NOBODY;
byte tokens, cuts;            /* given out */
byte epoch;
byte others_left = 1 + CRASHES;
bool ended;                   /* the lease of the claim that holds it is over */
byte holder = NOBODY;         /* the worker that was told so, until it settles or its lease ends */
byte workers_left = WORKERS;

#define IF(condition, action) if :: condition -> action :: else fi
#define LAST (w == WORKERS)     /* the last claimer: what is not done can be had */
#define SAME (FAULT == 1 -> now_.slot_no == slot_no : now_.token == token)
#define STEP(action) if :: atomic { epoch == mine -> action } :: epoch != mine -> goto lost fi
/* Waits for a lock; a crash ends the wait. */
#define WAIT(lock, action) \
    if :: atomic { epoch == mine && lock == NOBODY -> lock = w; action } :: epoch != mine -> goto lost fi

inline copy(from, to) {
    to.place = from.place; to.slot_no = from.slot_no; to.token = from.token;
    to.told = from.told
}

inline unlock() {
    IF(row_lock == w, row_lock = NOBODY);
    IF(claim_lock == w, claim_lock = NOBODY);
    IF(consumer_lock == w, consumer_lock = NOBODY)
}

inline new_token() {          /* _pgqueue.new_token: random, so no crash gives out a token again */
    tokens++; own[w].token = tokens; own[w].told = w; gets = true
}

inline check_claim() {
    assert(now_.place != done);
    assert(holder == NOBODY || ended)
}

/* Claims without the consumer's lock: a free slot (_pgqueue.claim_slot), or a ready run (_pgqueue.serve_ready). */
inline claim_quickly() {
    STEP(
        if
        :: row_lock == NOBODY && now_.token == 0 && (now_.place == slot || now_.place == line) ->
            row_lock = w;     /* for update skip locked */
            copy(now_, own[w]);
            new_token();
            IF(own[w].place == line, own[w].place = claimed)
        :: else -> goto lost
        fi)
}

/* Claims with the consumer's lock (_pgqueue.claim_in_turn): what is due, then the slots. */
inline claim_in_turn() {
    WAIT(consumer_lock, skip);
    STEP(                     /* _pgqueue.expire, _pgqueue.begin_block, _pgqueue.flush: rows that are locked are passed over */
        if
        :: now_.place == slot && row_lock != NOBODY -> goto lost
        :: now_.place == slot ->
            /* it may wait: Postgres follows a row to its last version */
            if
            :: epoch == mine && row_lock == NOBODY && now_.place == slot -> row_lock = w; copy(now_, own[w])
            :: epoch != mine || row_lock == NOBODY && now_.place != slot -> goto lost
            fi;
            if
            :: own[w].token == 0 -> own[w].place = line             /* _pgqueue.flush */
            :: own[w].token != 0 && ended -> own[w].place = line; own[w].token = 0      /* _pgqueue.release */
            :: own[w].token != 0 && !ended -> own[w].place = claimed;   /* _pgqueue.promote: the id stays */
                IF(FAULT == 3, tokens++; own[w].token = tokens)
            fi
        :: now_.place == claimed && ended && claim_lock == NOBODY && row_lock == NOBODY ->
            claim_lock = w; row_lock = w; copy(now_, own[w]);
            own[w].place = line; own[w].token = 0
        :: now_.place == line && row_lock == NOBODY -> row_lock = w; copy(now_, own[w])
        :: else -> goto lost
        fi);
    STEP(IF(own[w].place == line && own[w].token == 0,              /* _pgqueue.cut, then _pgqueue.claim_slot */
            cuts++; own[w].place = slot; own[w].slot_no = cuts; new_token()))
}

/* Finds the claim, and has it locked then: `found`. A statement sees the rows of its snapshot; of a row for which it
 * has waited it sees the last version. */
inline lock_claim_for_ack() {
    found = false;
    STEP(saw_slot = (now_.place == slot && SAME); saw_run = (now_.place == claimed && SAME));
    if
    :: saw_slot ->            /* _pgqueue.ack, the first statement */
        WAIT(row_lock, found = (now_.place == slot && SAME));
        STEP(IF(!found, row_lock = NOBODY))
    :: else
    fi;
    if
    :: !found ->              /* the second statement has a snapshot of its own */
        STEP(IF(FAULT != 2, saw_run = (now_.place == claimed && SAME)));
        if
        :: saw_run ->
            WAIT(claim_lock, found = (now_.place == claimed && SAME));
            STEP(IF(!found, claim_lock = NOBODY))
        :: else
        fi
    :: else
    fi
}

proctype Worker(byte w) {
    byte mine, token, slot_no, calls;
    bool gets, found, saw_slot, saw_run;
    do
    :: calls == CALLS -> break
    :: else ->
        atomic { calls++; mine = epoch }
        if
        :: !LAST -> claim_quickly()
        :: claim_in_turn()
        fi;
        if
        :: STEP(              /* commit: others see it, and the worker is told if it got the message */
            IF(gets, check_claim(); holder = w; ended = false; token = own[w].token; slot_no = own[w].slot_no);
            copy(own[w], now_); unlock())
        :: !LAST -> STEP(unlock(); gets = false)                    /* rollback */
        fi;
        if
        :: !gets || LAST -> goto lost
        :: gets && !LAST -> mine = epoch        /* the worker has the message, and settles it now or too late */
        :: gets && !LAST -> goto lost   /* the worker dies: its lease ends by itself */
        fi;
        if
        :: lock_claim_for_ack();                                    /* pgqueue.ack */
            STEP(
                /* whoever holds the message can settle it; nobody else */
                assert(!found || now_.told == w);
                assert(found || holder != w);
                IF(found, copy(now_, own[w]); own[w].place = done; own[w].token = 0));
            if
            :: STEP(
                IF(found, copy(own[w], now_); IF(holder == w, holder = NOBODY));
                unlock())
            :: STEP(unlock())                                       /* rollback */
            fi
        :: STEP(saw_slot = (now_.place == slot && SAME));   /* pgqueue.nack, _pgqueue.lock_claim */
            found = false;
            if
            :: saw_slot ->    /* _pgqueue.promote_slot: the consumer, then the slot */
                if :: FAULT != 4 -> WAIT(consumer_lock, skip) :: else fi;
                WAIT(row_lock, found = (now_.place == slot && now_.token == token));
                if :: FAULT == 4 -> WAIT(consumer_lock, skip) :: else fi;
                STEP(IF(!found, row_lock = NOBODY; consumer_lock = NOBODY))
            :: else
            fi;
            if
            :: !found ->
                STEP(saw_run = (now_.place == claimed && SAME));
                if
                :: saw_run -> /* the claim, then the consumer */
                    WAIT(claim_lock, found = (now_.place == claimed && SAME));
                    STEP(IF(!found, claim_lock = NOBODY));
                    if :: found -> WAIT(consumer_lock, skip) :: else fi
                :: else
                fi
            :: else
            fi;
            STEP(
                IF(found, assert(now_.token == token); now_.place = line; now_.token = 0;
                          IF(holder == w, holder = NOBODY));
                unlock())
        fi;
lost:   atomic {
            IF(epoch == mine, unlock());
            token = 0; slot_no = 0; found = false; saw_slot = false; saw_run = false; gets = false; mine = 0;
            own[w].place = line; own[w].slot_no = 0; own[w].token = 0;
            own[w].told = NOBODY
        }
    od;
    workers_left--;
    assert(!LAST || now_.place == done || holder == w)
}

/* Time passes: a lease ends while its worker lives, or after the worker died. */
proctype Clock() {
    do
    :: atomic { now_.token != 0 && !ended -> ended = true; holder = NOBODY }
    :: workers_left == 0 -> break
    od;
    others_left--
}

/* The server: its log reaches the disk at some time, and a crash forgets the rest (synchronous_commit = off). */
proctype Server() {
    if :: atomic { copy(now_, flushed) } :: skip fi;
    if
    :: atomic {
        copy(flushed, now_);
        cuts = now_.slot_no;  /* a sequence */
        row_lock = NOBODY; claim_lock = NOBODY; consumer_lock = NOBODY; holder = NOBODY; ended = true; epoch++
       }
    :: skip
    fi;
    others_left--
}

init {
    byte n;
    atomic {
        n = 0; do :: n < WORKERS -> run Worker(n); n++ :: else -> break od;
        run Clock();
        IF(CRASHES, run Server())
    }
    atomic {
        workers_left == 0 && others_left == 0;
        workers_left = 1; ended = true; holder = NOBODY;
        run Worker(WORKERS)   /* the last claimer */
    }
}
