-- The most frequent calls of all, before anything else is set up: a single claim without a sequence, from a connection
-- that knows its server (ARGV[4]), of a key that is sealed with the same payload, or that nobody has claimed before.
-- Like the MGET of a batch, a replay trusts that run_id: a server that restarted has no old connections. Whatever writes
-- a record asks the server itself.
if ARGV[4] ~= '' then
  local claim, marker, data = ARGV[10], redis.call('GET', KEYS[1]), redis.call('GET', KEYS[4])
  if marker and byte(marker) == 82 then
    if data then
      if sub(marker, -40) == ARGV[4] and replays(data, claim) then
        local now_ms = now()
        add_rows(KEYS[3], replay_row(data, claim, struct.pack('>I6', now_ms), ARGV[5]), ARGV[3])
        tally(ARGV[6], now_ms, label('d', 0, kind_of_claim(claim), claim, 112), 1)
        return 'R' .. data
      end
    elseif sub(marker, -40) == run_id() then
      local now_ms, number = now(), checked_number(redis.call('INCR', KEYS[2]))
      local ts, row = struct.pack('>I6', now_ms), nil
      data, row = first_grant(claim, tonumber(sub(marker, 3, -42)), number, now_ms, ts, ARGV[5])
      local ttl_ms = struct.unpack('>I6', claim, 100)
      put(KEYS[4], data, ttl_ms)
      redis.call('ZADD', ARGV[6] .. 'p', score(now_ms, ttl_ms), sub(claim, 20, 51))
      add_rows(KEYS[3], row, ARGV[3])
      return 'G\0' .. data
    end
  end
end
