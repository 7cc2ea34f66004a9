-- The most frequent seal, answered before anything else is set up: a single one without a sequence, by its owner, from a
-- connection that knows the run_id of its server (ARGV[4]). A server that has the lease may store the seal, so that
-- run_id is trusted.
if ARGV[4] ~= '' then
  local seal, marker, data = ARGV[8], redis.call('GET', KEYS[1]), redis.call('GET', KEYS[4])
  if marker and data and byte(seal) == $KEYED and byte(marker) == $code(R) and sub(marker, $MARKER_RUN) == ARGV[4] and owned(data, seal) and
    $pack(seal.epoch, tonumber(sub(marker, $MARKER_EPOCH))) == sub(seal, $seal.epoch) then
    local now_ms, row = now(), nil
    data, row = own_seal(data, seal, now_ms, $pack(record.when, now_ms), ARGV[5])
    local ttl_ms = $unpack(seal.ttl, seal)
    put(KEYS[4], data, ttl_ms)
    redis.call('ZREM', ARGV[6] .. 'p', sub(seal, $seal.digest))
    tally(ARGV[6], now_ms, seal_label(data, seal, ttl_ms), 1)
    add_rows(KEYS[2], row, ARGV[3])
    return 'S' .. data
  end
end
