-- The most frequent calls, answered before anything else is set up: a single claim without a sequence, from a connection
-- that knows the run_id of its server (ARGV[4]), of a key that is sealed with the same payload or was never claimed, or
-- of a lock that nobody holds.
-- Like the MGET of a batch, a replay trusts that run_id: no connection survives a restart of the server. A call that
-- writes a record reads the run_id from the server.
if ARGV[4] ~= '' then
  local claim, marker, data = ARGV[10], redis.call('GET', KEYS[1]), redis.call('GET', KEYS[4])
  if marker and byte(marker) == $code(R) then
    if data then
      if sub(marker, $MARKER_RUN) == ARGV[4] and replays(data, claim) then
        local now_ms = now()
        add_rows(KEYS[3], replay_row(data, claim, $pack(record.when, now_ms), ARGV[5]), ARGV[3])
        tally(ARGV[6], now_ms, label('d', 0, kind_of_claim(claim), claim, $claim.rest), 1)
        return 'R' .. data
      end
    elseif sub(marker, $MARKER_RUN) == run_id() then
      local now_ms, number = now(), checked_number(redis.call('INCR', KEYS[2]))
      local ts, row = $pack(record.when, now_ms), nil
      data, row = first_grant(claim, tonumber(sub(marker, $MARKER_EPOCH)), number, now_ms, ts, ARGV[5])
      local ttl_ms = $unpack(claim.pending_ttl, claim)
      put(KEYS[4], data, ttl_ms)
      redis.call('ZADD', ARGV[6] .. 'p', score(now_ms, ttl_ms), sub(claim, $claim.digest))
      add_rows(KEYS[3], row, ARGV[3])
      return 'G\0' .. data
    end
  end
end
