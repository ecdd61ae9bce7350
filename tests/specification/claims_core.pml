/* The steps of the present core, for claims.pml: a message that is ready is in a run, or in a slot that was cut for one
 * claim. A claimed slot is a claim itself; or it has become a claimed run with a row of claims.
 *
 * FAULT 2: an acknowledgement is one statement. 3: a slot gets another token when it becomes a run. 4: nack locks the
 * slot before the consumer.
 */

mtype = { slot, claimed };

/* Claims without the consumer's lock: a free slot (_pgqueue.claim_slot), or a ready run (_pgqueue.serve_ready). */
inline claim_quickly() {
    STEP(
        if
        :: message_lock == NOBODY && now_.token == 0 && (now_.place == slot || now_.place == ready) ->
            message_lock = w;     /* for update skip locked */
            copy(now_, own[w]);
            new_token();
            IF(own[w].place == ready, own[w].place = claimed)
        :: else -> goto lost
        fi)
}

/* Claims with the consumer's lock (_pgqueue.claim_in_turn): what is due, then the slots. */
inline claim_in_turn() {
    WAIT(consumer_lock, skip);
    STEP(                     /* _pgqueue.expire, _pgqueue.begin_block, _pgqueue.flush: rows that are locked are passed over */
        if
        :: now_.place == slot && message_lock != NOBODY -> goto lost
        :: now_.place == slot ->
            /* it may wait: Postgres follows a row to its last version */
            if
            :: epoch == mine && message_lock == NOBODY && now_.place == slot -> message_lock = w; copy(now_, own[w])
            :: epoch != mine || message_lock == NOBODY && now_.place != slot -> goto lost
            fi;
            if
            :: own[w].token == 0 -> own[w].place = ready             /* _pgqueue.flush */
            :: own[w].token != 0 && ended -> own[w].place = ready; own[w].token = 0      /* _pgqueue.release */
            :: own[w].token != 0 && !ended -> own[w].place = claimed;   /* _pgqueue.promote: the id stays */
                IF(FAULT == 3, tokens++; own[w].token = tokens)
            fi
        :: now_.place == claimed && ended && claim_lock == NOBODY && message_lock == NOBODY ->
            claim_lock = w; message_lock = w; copy(now_, own[w]);
            own[w].place = ready; own[w].token = 0
        :: now_.place == ready && message_lock == NOBODY -> message_lock = w; copy(now_, own[w])
        :: else -> goto lost
        fi);
    STEP(IF(own[w].place == ready && own[w].token == 0,              /* _pgqueue.cut, then _pgqueue.claim_slot */
            cuts++; own[w].place = slot; own[w].row = cuts; new_token()))
}

/* Finds the claim, and has it locked then: `found`. A statement sees the rows of its snapshot; of a row for which it
 * has waited it sees the last version. */
inline lock_claim_to_ack() {
    found = false;
    STEP(saw_first = (now_.place == slot && SAME); saw_then = (now_.place == claimed && SAME));
    if
    :: saw_first ->            /* _pgqueue.ack, the first statement */
        WAIT(message_lock, found = (now_.place == slot && SAME));
        STEP(IF(!found, message_lock = NOBODY))
    :: else
    fi;
    if
    :: !found ->              /* the second statement has a snapshot of its own */
        STEP(IF(FAULT != 2, saw_then = (now_.place == claimed && SAME)));
        if
        :: saw_then ->
            WAIT(claim_lock, found = (now_.place == claimed && SAME));
            STEP(IF(!found, claim_lock = NOBODY))
        :: else
        fi
    :: else
    fi
}

/* The same for what comes back, and the consumer is locked too. */
inline lock_claim_to_return() {
    found = false;
    STEP(saw_first = (now_.place == slot && SAME));             /* _pgqueue.lock_claim */
    if
    :: saw_first ->    /* _pgqueue.promote_slot: the consumer, then the slot */
        if :: FAULT != 4 -> WAIT(consumer_lock, skip) :: else fi;
        WAIT(message_lock, found = (now_.place == slot && now_.token == token));
        if :: FAULT == 4 -> WAIT(consumer_lock, skip) :: else fi;
        STEP(IF(!found, message_lock = NOBODY; consumer_lock = NOBODY))
    :: else
    fi;
    if
    :: !found ->
        STEP(saw_then = (now_.place == claimed && SAME));
        if
        :: saw_then -> /* the claim, then the consumer */
            WAIT(claim_lock, found = (now_.place == claimed && SAME));
            STEP(IF(!found, claim_lock = NOBODY));
            if :: found -> WAIT(consumer_lock, skip) :: else fi
        :: else
        fi
    :: else
    fi;
}
