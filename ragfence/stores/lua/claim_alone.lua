-- The most frequent calls of all, before anything else is set up: a single claim without a sequence, from a connection
-- that knows its server (ARGV[4]), of a key that is sealed with the same payload, or that nobody has claimed before.
-- Like the MGET of a batch, a replay trusts that run_id: a server that restarted has no old connections. Whatever writes
-- a record asks the server itself.
if ARGV[4] ~= '' then
  local claim, marker, data = ARGV[9], redis.call('GET', KEYS[1]), redis.call('GET', KEYS[4])
  if marker and byte(marker) == 82 then
    if data then
      if sub(marker, -40) == ARGV[4] and replays(data, claim) then
        add_rows(KEYS[3], replay_row(data, claim, struct.pack('>I6', now()), ARGV[5]), ARGV[3])
        return 'R' .. data
      end
    elseif sub(marker, -40) == run_id() then
      local now_ms, number = now(), checked_number(redis.call('INCR', KEYS[2]))
      local ts, row = struct.pack('>I6', now_ms), nil
      data, row = first_grant(claim, tonumber(sub(marker, 3, -42)), number, now_ms, ts, ARGV[5])
      put(KEYS[4], data, struct.unpack('>I6', claim, 100))
      add_rows(KEYS[3], row, ARGV[3])
      return 'G\0' .. data
    end
  end
end
