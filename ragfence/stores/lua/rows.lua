-- Decision rows of one or more shards, where nothing is to be decided any more.
--
-- KEYS   the streams
-- ARGV   [1] most rows to keep, or '0'; then per stream its encoded rows
-- Returns how many streams there are

for i, rows_key in ipairs(KEYS) do add_rows(rows_key, ARGV[i + 1], ARGV[1]) end
return #KEYS
