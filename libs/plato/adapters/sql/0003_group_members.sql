-- readable by: 2
-- How many members a group has, kept by its partition's owner in the transaction that changes them: so that a batch with a
-- message to a large group reads one number instead of all its members. Other kinds of conversation leave it at 0.

ALTER TABLE im_conversation ADD COLUMN members integer NOT NULL DEFAULT 0;
