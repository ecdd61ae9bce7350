/* The steps of the core, for claims.pml: a message is in one bundle, a row that is the claim of it once it has a token.
 * Nothing moves a claim to another row. Its lane may change: after a second, a claim stands in that of held ones.
 *
 * FAULT 2: an acknowledgement does not judge the token again after it has waited. 3: a claim that is held for long gets
 * another token. 4: what comes back locks the bundle before the consumer.
 */

mtype = { held };             /* the other place, ready, is a lane of priorities, or that of assigned bundles */

/* Claims without the consumer's lock: one update of the first free bundle (_pgqueue.claim_free). While another claimer
 * has that lock, _pgqueue.claim_without_lock locks the bundle, and _pgqueue.claim_bundles updates it: the same step here. */
inline claim_quickly() {
    STEP(
        if
        :: message_lock == NOBODY && now_.token == 0 && now_.place != done ->
            message_lock = w;     /* for update skip locked */
            copy(now_, own[w]);
            new_token()
        :: else -> goto lost
        fi)
}

/* Claims with the consumer's lock (_pgqueue.claim_locked): what is due, then a free bundle, which may be cut. */
inline claim_locked() {
    WAIT(consumer_lock, skip);
    STEP(                     /* bundles that are locked are passed over */
        if
        :: FAULT != 4 && message_lock != NOBODY -> goto lost
        :: now_.place == done -> goto lost
        :: else ->            /* with the fault, it waits */
            if
            :: epoch == mine && message_lock == NOBODY && now_.place != done -> message_lock = w; copy(now_, own[w])
            :: epoch != mine || message_lock == NOBODY && now_.place == done -> goto lost
            fi
        fi);
    STEP(
        IF(own[w].token != 0, own[w].place = held;        /* _pgqueue.move_long_claims, _pgqueue.move_to_long: the number stays */
                              IF(FAULT == 3, tokens++; own[w].token = tokens));
        /* _pgqueue.expire, _pgqueue.release */
        IF(own[w].place == held && ended, own[w].place = ready; own[w].token = 0));
    STEP(IF(own[w].token == 0,                            /* _pgqueue.collect */
            if :: cuts++; own[w].row = cuts :: skip fi;   /* _pgqueue.cut: a part has a number of its own */
            new_token()))                                 /* _pgqueue.claim_bundles */
}

/* Finds the claim, and has it locked then: `found`. One statement, which judges the last version of a row again for
 * which it has waited. */
inline lock_claim_to_ack() {
    found = false;
    STEP(saw_it = (now_.place != done && SAME));          /* pgqueue.ack */
    if
    :: saw_it ->
        WAIT(message_lock, found = (FAULT == 2 || now_.place != done && SAME));
        STEP(IF(!found, message_lock = NOBODY))
    :: else
    fi
}

/* The same for what comes back: the consumer, then the bundle (_pgqueue.lock_claim, _pgqueue.lock_bundles). */
inline lock_claim_to_return() {
    found = false;
    STEP(saw_it = (now_.place != done && SAME));
    if
    :: saw_it ->
        if :: FAULT != 4 -> WAIT(consumer_lock, skip) :: else fi;
        WAIT(message_lock, found = (now_.place != done && SAME));
        if :: FAULT == 4 -> WAIT(consumer_lock, skip) :: else fi;
        STEP(IF(!found, message_lock = NOBODY; consumer_lock = NOBODY))
    :: else
    fi
}
