-- Ends some reservations, each once, and frees their slots.
--
-- ARGV[1]  msgpack of {lifetime of a lease in us, {{id, input tokens, output tokens, is unsure}, ...}}
--          is unsure: the command that makes or renews the reservation may yet come, and must find it ended.
-- Returns  how many there were
local lifetime, settlements = unpack(cmsgpack.unpack(ARGV[1]))
local num_settled, ids = 0, {}
for number, settlement in ipairs(settlements) do
  local id, input, output, is_unsure = unpack(settlement)
  ids[number] = id
  if settle(id, input, output) then num_settled = num_settled + 1 end
  if is_unsure == 1 then keep(id, '', lifetime) end
end
for index = 4, #KEYS do redis.call('ZREM', KEYS[index], unpack(ids)) end
write_accounts()
return num_settled
