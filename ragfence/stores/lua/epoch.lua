-- Markers and hydration. Every write compares the marker first, so a hydration that was overtaken does nothing.
--
-- KEYS   the markers of the shards concerned; for 'load' and 'forget_ended', after the one marker, the records
-- ARGV   [1] 'begin', 'load', 'finish', 'forget' (the markers of older epochs) or 'forget_ended' (records that ended),
--        [2] the epoch; for 'load' the values, in the order of KEYS
-- Returns 1 done | 0 the markers are not what the step needs

local action, epoch = ARGV[1], tonumber(ARGV[2])
local run = run_id()

local function hydrating(marker_key)
  local m = read_marker(marker_key)
  -- The run too: a server that restarted in between may have lost what was loaded before.
  return m and not m.ready and m.epoch == epoch and m.run == run
end

if action == 'begin' then
  for _, marker_key in ipairs(KEYS) do
    local m = read_marker(marker_key)
    if m and m.epoch >= epoch then return 0 end
  end
  for _, marker_key in ipairs(KEYS) do write_marker(marker_key, 'H', epoch, run) end
elseif action == 'load' then
  if not hydrating(KEYS[1]) then return 0 end
  for i = 2, #KEYS do redis.call('SET', KEYS[i], ARGV[i + 1]) end
elseif action == 'finish' then
  for _, marker_key in ipairs(KEYS) do
    if not hydrating(marker_key) then return 0 end
  end
  for _, marker_key in ipairs(KEYS) do write_marker(marker_key, 'R', epoch, run) end
elseif action == 'forget_ended' then
  for i = 2, #KEYS do
    local version, state = byte(redis.call('GET', KEYS[i]) or '', 1, 2)
    if version == 1 and (state % 16 == SEALED or state % 16 == FAILED) then redis.call('DEL', KEYS[i]) end
  end
else
  for _, marker_key in ipairs(KEYS) do
    local m = read_marker(marker_key)
    if m and m.ready and m.epoch < epoch then redis.call('DEL', marker_key) end
  end
end
return 1
