/* The steps of a core with one form of claim, for claims.pml: a message is in one row, which is the claim of it once it
 * has a token. Nothing moves a claim to another row, and nothing but a deletion ends the row.
 *
 * FAULT 2: an acknowledgement does not judge the token again after it has waited. 3: a claim that is held for long gets
 * another token. 4: what comes back locks the row before the consumer.
 */

/* Claims without the consumer's lock: one update of the first free row. */
inline claim_quickly() {
    STEP(
        if
        :: message_lock == NOBODY && now_.token == 0 && now_.place == ready ->
            message_lock = w;     /* for update skip locked */
            copy(now_, own[w]);
            new_token()
        :: else -> goto lost
        fi)
}

/* Claims with the consumer's lock: what is due comes first, and a large row is cut into others. */
inline claim_in_turn() {
    WAIT(consumer_lock, skip);
    STEP(                     /* rows that are locked are passed over */
        if
        :: FAULT != 4 && message_lock != NOBODY -> goto lost
        :: now_.place == done -> goto lost
        :: else ->            /* with the fault, it waits */
            if
            :: epoch == mine && message_lock == NOBODY && now_.place == ready -> message_lock = w; copy(now_, own[w])
            :: epoch != mine || message_lock == NOBODY && now_.place != ready -> goto lost
            fi
        fi);
    STEP(
        if
        :: own[w].token != 0 && !ended -> IF(FAULT == 3, tokens++; own[w].token = tokens)
        :: else ->            /* its lease is over, or it is free */
            own[w].token = 0;
            new_token();
            if :: cuts++; own[w].row = cuts :: skip fi
        fi)
}

/* Finds the claim, and has it locked then: `found`. One statement, which judges the last version of a row again for
 * which it has waited. */
inline lock_claim_to_ack() {
    found = false;
    STEP(saw_first = (now_.place == ready && SAME));
    if
    :: saw_first ->
        WAIT(message_lock, found = (FAULT == 2 || now_.place == ready && SAME));
        STEP(IF(!found, message_lock = NOBODY))
    :: else
    fi
}

/* The same for what comes back: the consumer, then the row. */
inline lock_claim_to_return() {
    found = false;
    STEP(saw_first = (now_.place == ready && SAME));
    if
    :: saw_first ->
        if :: FAULT != 4 -> WAIT(consumer_lock, skip) :: else fi;
        WAIT(message_lock, found = (now_.place == ready && SAME));
        if :: FAULT == 4 -> WAIT(consumer_lock, skip) :: else fi;
        STEP(IF(!found, message_lock = NOBODY; consumer_lock = NOBODY))
    :: else
    fi
}
