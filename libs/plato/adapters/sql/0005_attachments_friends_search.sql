-- readable by: 3
-- Attachments and who uses them, friends, and what search looks into.

-- ── attachments ─────────────────────────────────────────────────────────────────────────────────────────────

-- A row stands before the first byte is stored, so that no blob is without one. unused_since: NULL while a message that was
-- not recalled references it; what is unused for a day is removed.
CREATE TABLE im_attachment (
    attachment_id  text COLLATE "C" PRIMARY KEY,
    owner          text COLLATE "C" NOT NULL,
    name           text             NOT NULL,
    media_type     text             NOT NULL,
    size_bytes     bigint           NOT NULL,
    sha256         bytea            NOT NULL,
    width          integer          NOT NULL DEFAULT 0,   -- pictures, as they are shown
    height         integer          NOT NULL DEFAULT 0,
    thumbnail_type text             NOT NULL DEFAULT '',  -- '': there is none
    thumbnail_size integer          NOT NULL DEFAULT 0,
    stored         boolean          NOT NULL DEFAULT false,
    created_at     timestamptz      NOT NULL DEFAULT now(),
    unused_since   timestamptz               DEFAULT now()
) WITH (fillfactor = 80);
CREATE INDEX im_attachment_unused ON im_attachment (unused_since) WHERE unused_since IS NOT NULL;
CREATE INDEX im_attachment_unused_of ON im_attachment (owner) WHERE unused_since IS NOT NULL;

CREATE TABLE im_attachment_use (
    attachment_id   text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    seq             bigint           NOT NULL,
    PRIMARY KEY (attachment_id, conversation_id, seq)
);
CREATE INDEX im_attachment_use_by_message ON im_attachment_use (conversation_id, seq);

-- ── friends ─────────────────────────────────────────────────────────────────────────────────────────────────

-- Two rows per relation, written together under both users' rows of im_user. relation: 0 none, 1 user asked other, 2 other asked
-- user, 3 friends; always the other row's counterpart. blocked is this user's own, and hides the relation from him alone.
CREATE TABLE im_friend (
    user_id  text COLLATE "C" NOT NULL,
    other_id text COLLATE "C" NOT NULL,
    version  bigint           NOT NULL,  -- of the user's state when what he sees of this row last changed; a row that is 0 stays for it
    relation smallint         NOT NULL DEFAULT 0,
    blocked  boolean          NOT NULL DEFAULT false,
    words    text             NOT NULL DEFAULT '',
    PRIMARY KEY (user_id, other_id)
) WITH (fillfactor = 70);
CREATE INDEX im_friend_by_version ON im_friend (user_id, version);
CREATE INDEX im_friend_blocked ON im_friend (other_id, user_id) WHERE blocked;  -- who blocks a sender

-- NULL: as msg.friends_only says.
ALTER TABLE im_user ALTER COLUMN friends_only DROP NOT NULL;
ALTER TABLE im_user ALTER COLUMN friends_only DROP DEFAULT;
UPDATE im_user SET friends_only = NULL;
CREATE INDEX im_user_friends_only ON im_user (user_id) WHERE friends_only;

-- ── search ──────────────────────────────────────────────────────────────────────────────────────────────────

-- What can be found of a message: its text as it is said, and the words of it that queries name (plato_msg.core.words), among
-- them one for its conversation, so that one look into the index is for words and conversations at once.
CREATE TABLE im_text (
    conversation_id text COLLATE "C" NOT NULL,
    seq             bigint           NOT NULL,
    msg_id          bigint           NOT NULL,
    changed_seq     bigint           NOT NULL,  -- as im_message's when this was read: another one there, and this row is stale
    said            text             NOT NULL,
    words           tsvector         NOT NULL,
    PRIMARY KEY (conversation_id, seq)
);
CREATE INDEX im_text_words ON im_text USING gin (words);

-- Up to where a conversation was read for that.
CREATE TABLE im_text_mark (
    conversation_id text COLLATE "C" PRIMARY KEY,
    seq             bigint           NOT NULL
) WITH (fillfactor = 80);
