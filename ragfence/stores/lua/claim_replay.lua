-- The most frequent claim of all, before anything else is set up: a single one, without a sequence, of a key that is
-- sealed with the same payload. Like the MGET of a batch it trusts the run_id that was read when the connection was
-- opened (ARGV[4]): a server that restarted has no old connections. Whatever writes a record asks the server itself.
if ARGV[4] ~= '' and ARGV[8] == '1' and ARGV[2] == '1' then
  local byte, sub = string.byte, string.sub
  local claim, marker = ARGV[9], redis.call('GET', KEYS[1])
  if byte(claim) == 0 and ARGV[7] == '' and marker and byte(marker) == 82 and sub(marker, -40) == ARGV[4] then
    local data = redis.call('GET', KEYS[4])
    local version, flags
    if data then version, flags = byte(data, 1, 2) end
    if version == 1 and flags % 16 == 4 and sub(data, 3, 18) == sub(claim, 52, 67) then
      local effect_id, at = '\0', 58 + byte(data, 57)
      if flags % 128 >= 64 then
        if flags % 32 >= 16 then at = at + 1 + byte(data, at) end
        if flags % 64 >= 32 then at = at + 1 + byte(data, at) end
        effect_id = sub(data, at, at + byte(data, at))
      end
      at = 113 + byte(claim, 112)
      at = at + 1 + byte(claim, at)
      at = at + 4 + struct.unpack('>I4', claim, at)
      local row = '\1' .. sub(claim, 3, 15) .. struct.pack('>I6', now()) .. '\2\0' .. sub(claim, 16, 19) ..
        '\0\0\0\0\0\0' .. ARGV[5] .. sub(claim, 20, 51) .. sub(data, 3, 56) .. effect_id .. '\0' .. sub(claim, at)
      if ARGV[3] == '0' then
        redis.call('XADD', KEYS[3], '*', 'd', row)
      else
        redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], '*', 'd', row)
      end
      return { { 'R', data } }
    end
  end
end
