-- readable by: 3
-- Groups that people lead, messages that are changed, and what a user's devices share.

-- changed_seq: of the newest operation that changed an older row (EDIT, RECALL): rows held in memory are good while it stands.
ALTER TABLE im_conversation ADD COLUMN title text NOT NULL DEFAULT '';
ALTER TABLE im_conversation ADD COLUMN changed_seq bigint NOT NULL DEFAULT 0;

-- 0 member, 1 administrator, 2 owner (wire: Role). Members of other kinds than groups are 0.
ALTER TABLE im_member ADD COLUMN role smallint NOT NULL DEFAULT 0;
CREATE INDEX im_member_leaders ON im_member (conversation_id, role) WHERE role > 0;

-- Who left or was removed: may still read (joined_seq, left_seq]. A table of its own, so that im_member holds who is a member
-- now, for a program of the version before as well.
CREATE TABLE im_former_member (
    conversation_id text COLLATE "C" NOT NULL,
    user_id         text COLLATE "C" NOT NULL,
    joined_seq      bigint           NOT NULL,
    left_seq        bigint           NOT NULL,
    title           text             NOT NULL DEFAULT '',  -- the group's at the leave
    PRIMARY KEY (conversation_id, user_id)
);
CREATE INDEX im_former_member_by_user ON im_former_member (user_id, conversation_id);

-- A recalled row stays, with an empty body; changed_seq: of the newest operation on it.
ALTER TABLE im_message ADD COLUMN changed_seq bigint NOT NULL DEFAULT 0;
ALTER TABLE im_message ADD COLUMN recalled boolean NOT NULL DEFAULT false;

-- The EDITs of a message: a recall of it empties them.
CREATE TABLE im_edit (
    conversation_id text COLLATE "C" NOT NULL,
    of_seq          bigint           NOT NULL,
    seq             bigint           NOT NULL,
    PRIMARY KEY (conversation_id, of_seq, seq)
);

-- version: raised by each change of what the user's devices share, under this row's lock, so the order of versions is the order
-- of commits.
CREATE TABLE im_user (
    user_id      text COLLATE "C" PRIMARY KEY,
    version      bigint  NOT NULL DEFAULT 0,
    friends_only boolean NOT NULL DEFAULT false
) WITH (fillfactor = 70);

-- No index but the key: what changes in a row is in none, so a read is a heap-only update; and a planner that takes a user's
-- rows for few would look single ones up by an index on (user_id, version). The changes since a version are found among all of
-- the user's rows.
CREATE TABLE im_user_state (
    user_id         text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    version         bigint           NOT NULL,
    read_seq        bigint           NOT NULL DEFAULT 0,
    pinned_at       timestamptz,
    muted_until     timestamptz,
    peer_read_seq   bigint           NOT NULL DEFAULT 0,
    cleared_seq     bigint           NOT NULL DEFAULT 0,
    PRIMARY KEY (user_id, conversation_id)
) WITH (fillfactor = 70);

CREATE TABLE im_hidden (
    user_id         text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    seq             bigint           NOT NULL,
    version         bigint           NOT NULL,
    PRIMARY KEY (user_id, conversation_id, seq)
);
