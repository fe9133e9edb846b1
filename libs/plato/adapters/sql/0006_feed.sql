-- readable by: 3
-- What application servers read: the feed of messages, how far hooks have come in it, and pushes that wait to be handed over.

-- One row per message, by its record's place on the bus, written with it: only its partition's owner writes, so in a partition the
-- order of positions is that of commits, and who reads on from a position misses nothing. Written while msg.events is on, or a
-- hook needs it.
CREATE TABLE im_feed (
    partition       integer          NOT NULL,
    position        bigint           NOT NULL,
    msg_id          bigint           NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    seq             bigint           NOT NULL,
    at              timestamptz      NOT NULL DEFAULT now(),
    PRIMARY KEY (partition, position)
);

-- The position of the last row that was removed.
CREATE TABLE im_feed_floor (
    partition integer PRIMARY KEY,
    position  bigint NOT NULL
);

-- Everything up to here was handed over (hook 'after'), or has its rows in im_push ('push').
CREATE TABLE im_hook_cursor (
    hook      text    NOT NULL,
    partition integer NOT NULL,
    position  bigint  NOT NULL,
    PRIMARY KEY (hook, partition)
) WITH (fillfactor = 50);

-- One row per message and user who was not online; removed when it was handed over.
CREATE TABLE im_push (
    msg_id          bigint           NOT NULL,
    user_id         text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    seq             bigint           NOT NULL,
    partition       integer          NOT NULL,
    position        bigint           NOT NULL,
    claimed_until   timestamptz      NOT NULL DEFAULT '-infinity',
    PRIMARY KEY (msg_id, user_id)
);
CREATE INDEX im_push_by_position ON im_push (partition, position);

-- What the application said when it refused the message.
ALTER TABLE im_outcome ADD COLUMN words text;
