-- Extends the leases of requests that run, and takes note of their output so far. One that is not known, since
-- Redis was flushed or away when it began, gets its slots and a reservation now.
--
-- ARGV[1]  msgpack of {lifetime of a lease in us, dimensions as for reserving, requests}
--          request: {id, output so far, input and output that its accounts have been charged with}
-- Returns  how many were not known
local lifetime, dimensions, requests = unpack(cmsgpack.unpack(ARGV[1]))
local ends_at, num_unknown = as_text(now + lifetime), 0

-- Nothing of these charges can be given back: whether they ever were in this Redis is not known.
local function uncharged()
  local charges = {}
  for _, dimension in ipairs(dimensions) do
    local kind, field, limit, _, counts = unpack(dimension)
    if kind ~= SLOTS and counts > 0 then charges[#charges + 1] = {kind, field, limit, counts, 0, 0} end
  end
  return charges
end

local function renew(id, output_so_far, input, output)
  local stored = redis.call('HGET', KEYS[2], id)
  if stored == '' then return end -- it has ended meanwhile
  local kept = stored and cmsgpack.unpack(stored) or {input, output, 0, uncharged()}
  kept[3] = output_so_far
  keep(id, cmsgpack.pack(kept), lifetime)
  for index = 4, #KEYS do
    if stored then -- a slot that it was not charged with (see shadow in reserve.lua) is not taken here either
      redis.call('ZADD', KEYS[index], 'XX', ends_at, id)
    else
      redis.call('ZADD', KEYS[index], ends_at, id)
    end
  end
  if not stored then num_unknown = num_unknown + 1 end
end

for _, request in ipairs(requests) do renew(unpack(request)) end
for index = 4, #KEYS do redis.call('PEXPIRE', KEYS[index], math.ceil(lifetime / 1000)) end
write_accounts()
return num_unknown
