-- readable by: 3
-- New texts go into the index itself instead of a list beside it: every look reads the whole list, some 130 ms where it is full, and a
-- search of somebody in thousands of groups is many looks. Writing costs more for it, where no message waits for it.

ALTER INDEX im_text_words SET (fastupdate = off);
SELECT gin_clean_pending_list('im_text_words');
