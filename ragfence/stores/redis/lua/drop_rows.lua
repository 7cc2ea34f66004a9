-- Entries of a stream of decision rows that are stored elsewhere by now go, if they still are what was read: after a
-- failover the same id may stand for another entry, which nobody has stored.
--
-- KEYS   [1] the stream
-- ARGV   the id and the SHA-1 of the data of each entry
-- Returns how many went

local dropped = 0
for i = 1, #ARGV, 2 do
  local found = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])
  if found[1] and redis.sha1hex(found[1][2][2]) == ARGV[i + 1] then
    dropped = dropped + redis.call('XDEL', KEYS[1], ARGV[i])
  end
end
return dropped
