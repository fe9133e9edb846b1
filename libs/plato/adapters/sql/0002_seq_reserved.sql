-- readable by: 1
-- What the allocators `redis` and `segment` reserved (design §8): no seq above `upto` was ever given by them. It only rises;
-- a row that is lost costs nothing but its numbers, since im_conversation.last_seq stands behind it (R9).

CREATE TABLE im_seq_reserved (
    conversation_id text COLLATE "C" PRIMARY KEY,
    upto            bigint NOT NULL
) WITH (fillfactor = 80);
