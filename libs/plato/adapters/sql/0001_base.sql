-- The bus, the partitions' owners, and the messages. Every id sorts by its UTF-8 bytes: COLLATE "C".
-- Run by schema_pg.migrate with search_path set to Plato's schema; rows of bus_head and bus_owner are made there, since
-- only it knows the number of partitions.

CREATE TABLE meta (
    key   text PRIMARY KEY,
    value text NOT NULL
);

-- ── bus ─────────────────────────────────────────────────────────────────────────────────────────────────────

CREATE TABLE bus_head (
    partition     integer PRIMARY KEY,
    next_position bigint  NOT NULL DEFAULT 1
) WITH (fillfactor = 50);  -- updated by each append; room for heap-only updates

CREATE TABLE bus_record (
    partition integer     NOT NULL,
    position  bigint      NOT NULL,
    value     bytea       NOT NULL,
    at        timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (partition, position)
);

-- Appends records (partitions[i], "values"[i]), each partition's in the order given, all or nothing.
-- The heads are locked in ascending order, so that two appends cannot deadlock, and held to commit: position order is
-- commit order (R8). NOTIFY is sent by the same commit.
CREATE FUNCTION bus_append(partitions integer[], "values" bytea[], channel text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    touched integer[];
BEGIN
    SELECT array_agg(locked.partition) INTO touched FROM (
        SELECT h.partition FROM bus_head h WHERE h.partition = ANY (partitions) ORDER BY h.partition FOR UPDATE
    ) locked;

    WITH given AS (
        SELECT g.partition, g.value, row_number() OVER (PARTITION BY g.partition ORDER BY g.place) AS nth
        FROM unnest(partitions, "values") WITH ORDINALITY AS g(partition, value, place)
    ), moved AS (
        UPDATE bus_head h SET next_position = h.next_position + counted.n
        FROM (SELECT given.partition, count(*) AS n FROM given GROUP BY given.partition) counted
        WHERE h.partition = counted.partition
        RETURNING h.partition, h.next_position - counted.n AS first
    )
    INSERT INTO bus_record (partition, position, value)
    SELECT given.partition, moved.first + given.nth - 1, given.value
    FROM given LEFT JOIN moved USING (partition)  -- an unknown partition has no head: NULL position, refused
    ORDER BY 1, 2;

    PERFORM pg_notify(channel, array_to_string(touched, ','));
END
$$;

-- ── owners (R7) ─────────────────────────────────────────────────────────────────────────────────────────────

CREATE TABLE bus_owner (
    partition  integer PRIMARY KEY,
    owner      text    NOT NULL DEFAULT '',  -- uid of a msg process; '': released
    epoch      bigint  NOT NULL DEFAULT 0,
    position   bigint  NOT NULL DEFAULT 0,   -- every record up to here has its outcome
    fanned_out bigint  NOT NULL DEFAULT 0    -- every record up to here was taken by its shards, or they are dirty
) WITH (fillfactor = 50);

CREATE TABLE bus_member (
    uid  text   PRIMARY KEY,
    beat bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- Shards that may have missed frames. A count never repeats, though rows go when the shard reports them done.
CREATE TABLE bus_dirty (
    shard text   PRIMARY KEY,
    count bigint NOT NULL
);
CREATE SEQUENCE bus_dirty_count;

-- Raises the counts of shards. The lock makes the order of counts the order of commits: else a count that was drawn early
-- and committed late would look done already.
CREATE FUNCTION bus_mark_dirty(shards text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    LOCK TABLE bus_dirty IN SHARE ROW EXCLUSIVE MODE;
    INSERT INTO bus_dirty (shard, count) SELECT s, nextval('bus_dirty_count') FROM (SELECT DISTINCT unnest(shards)) d(s)
    ON CONFLICT (shard) DO UPDATE SET count = EXCLUDED.count;
END
$$;

-- Records that no outcome can be kept for: undecodable ones. For whoever looks after the cluster.
CREATE TABLE bus_poison (
    partition integer     NOT NULL,
    position  bigint      NOT NULL,
    reason    text        NOT NULL,
    value     bytea       NOT NULL,
    at        timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (partition, position)
);

-- ── messages ────────────────────────────────────────────────────────────────────────────────────────────────

CREATE TABLE im_conversation (
    conversation_id text COLLATE "C" PRIMARY KEY,
    kind            text        NOT NULL,  -- 'dialogue' or 'open'
    last_seq        bigint      NOT NULL DEFAULT 0,
    created_at      timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 80);

CREATE TABLE im_member (
    conversation_id text COLLATE "C" NOT NULL,
    user_id         text COLLATE "C" NOT NULL,
    joined_seq      bigint           NOT NULL DEFAULT 0,  -- the seq before the join: the first cursor
    PRIMARY KEY (conversation_id, user_id)
);
CREATE UNIQUE INDEX im_member_by_user ON im_member (user_id, conversation_id);

CREATE TABLE im_message (
    msg_id          bigint           PRIMARY KEY,
    conversation_id text COLLATE "C" NOT NULL,
    seq             bigint           NOT NULL,
    prev_seq        bigint           NOT NULL,
    from_user       text COLLATE "C" NOT NULL,
    msg_type        bigint           NOT NULL,
    body            bytea            NOT NULL,
    client_msg_id   bytea            NOT NULL,
    server_at       timestamptz      NOT NULL,
    UNIQUE (conversation_id, seq),
    UNIQUE (conversation_id, from_user, client_msg_id)
);

CREATE TABLE im_outcome (
    conversation_id text COLLATE "C" NOT NULL,
    from_user       text COLLATE "C" NOT NULL,
    client_msg_id   bytea            NOT NULL,
    code            integer          NOT NULL,
    msg_id          bigint,  -- NULL for a refusal
    seq             bigint,
    PRIMARY KEY (conversation_id, from_user, client_msg_id)
);
