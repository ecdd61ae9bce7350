/* A message and its claims: workers claim it, acknowledge it or give it back, come too late, roll back and vanish;
 * leases end; and the server crashes with the tail of its log lost. Each step is one statement: what it waits for, and
 * what it then finds, by the rules of read committed.
 *
 * Spin walks through every order of these steps, and checks that
 *   - no worker gets the message while another worker's lease runs, or after it was acknowledged;
 *   - only the claim that holds the message settles it, and that claim can, as long as nobody has taken it over;
 *   - no two calls wait for each other, and the message is never lost: a last claimer gets it, unless it is done.
 *
 * How a claim is found, made, and locked is of the core, in a file that is included here. order.pml has what is behind
 * others of its key.
 *
 * FAULT plants a fault that Spin must find. 1: the id of a claim is the number of its bundle.
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

mtype = { ready, done };      /* a core may have other places for a message that is not done */
#define NOBODY 255

typedef Message {
    mtype place = ready;
    byte  row;                /* the number of its bundle */
    byte  token;              /* 0: nobody has claimed it */
    byte  told = NOBODY       /* the worker that got the token */
}

Message now_, flushed;        /* committed; and what a crash leaves of it */
Message own[WORKERS + 1];     /* what an open transaction has made of it: seen by others when it is committed */
byte message_lock = NOBODY;   /* who has locked its bundle */
byte consumer_lock = NOBODY;
byte tokens, cuts;            /* given out */
byte epoch;
byte others_left = 1 + CRASHES;
bool ended;                   /* the lease of the claim that holds it is over */
byte holder = NOBODY;         /* the worker that was told so, until it settles or its lease ends */
byte workers_left = WORKERS;

#define IF(condition, action) if :: condition -> action :: else fi
#define LAST (w == WORKERS)     /* the last claimer: what is not done can be had */
#define SAME (FAULT == 1 -> now_.row == row : now_.token == token)
#define STEP(action) if :: atomic { epoch == mine -> action } :: epoch != mine -> goto lost fi
/* Waits for a lock; a crash ends the wait. */
#define WAIT(lock, action) \
    if :: atomic { epoch == mine && lock == NOBODY -> lock = w; action } :: epoch != mine -> goto lost fi

inline copy(from, to) {
    to.place = from.place; to.row = from.row; to.token = from.token;
    to.told = from.told
}

inline unlock() {
    IF(message_lock == w, message_lock = NOBODY);
    IF(consumer_lock == w, consumer_lock = NOBODY)
}

inline new_token() {          /* _pgqueue.new_token: random, so no crash gives out a token again */
    tokens++; own[w].token = tokens; own[w].told = w; gets = true
}

inline check_claim() {
    assert(now_.place != done);
    assert(holder == NOBODY || ended)
}

#include "claims_core.pml"

proctype Worker(byte w) {
    byte mine, token, row, calls;
    bool gets, found, saw_it;
    do
    :: calls == CALLS -> break
    :: else ->
        atomic { calls++; mine = epoch }
        if
        :: !LAST -> claim_quickly()
        :: claim_locked()
        fi;
        if
        :: STEP(              /* commit: others see it, and the worker is told if it got the message */
            IF(gets, check_claim(); holder = w; ended = false; token = own[w].token; row = own[w].row);
            copy(own[w], now_); unlock())
        :: !LAST -> STEP(unlock(); gets = false)                    /* rollback */
        fi;
        if
        :: !gets || LAST -> goto lost
        :: gets && !LAST -> mine = epoch        /* the worker has the message, and settles it now or too late */
        :: gets && !LAST -> goto lost   /* the worker dies: its lease ends by itself */
        fi;
        if
        :: lock_claim_to_ack();                                     /* pgqueue.ack */
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
        :: lock_claim_to_return();                                  /* pgqueue.nack */
            STEP(
                IF(found, assert(now_.token == token); now_.place = ready; now_.token = 0;
                          IF(holder == w, holder = NOBODY));
                unlock())
        fi;
lost:   atomic {
            IF(epoch == mine, unlock());
            token = 0; row = 0; found = false; saw_it = false; gets = false; mine = 0;
            own[w].place = ready; own[w].row = 0; own[w].token = 0;
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
        cuts = now_.row;  /* a sequence */
        message_lock = NOBODY; consumer_lock = NOBODY; holder = NOBODY; ended = true; epoch++
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
