-- Deletes entries of a stream of decision rows that have been stored elsewhere, if they are still what was read: after a
-- failover the same id may belong to another entry, which has not been stored.
--
-- KEYS   [1] the stream
-- ARGV   the id and the SHA-1 of the data of each entry
-- Returns how many were deleted

local dropped = 0
for i = 1, #ARGV, 2 do
  local found = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])
  if found[1] and redis.sha1hex(found[1][2][2]) == ARGV[i + 1] then
    dropped = dropped + redis.call('XDEL', KEYS[1], ARGV[i])
  end
end
return dropped
