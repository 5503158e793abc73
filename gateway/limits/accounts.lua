-- What the scripts of the limits share: it stands before each of them.
--
-- All of one tenant's state lies in a few keys:
--   KEYS[1]   hash of accounts: "SCOPE LIMIT" -> "MARK REFUNDED" of a rate, "DAY USED" of a day's quota
--   KEYS[2]   hash of reservations: id -> msgpack of {input, output, reported, charges}; '' stands for one that
--             was settled while nobody could say whether it had been made: it must not be made any more
--   KEYS[3]   sorted set of their leases: id -> when it runs out
--   KEYS[4..] sorted sets of concurrency slots, one for each scope: id -> when it runs out
--
-- A rate is a GCRA (ITU-T I.371): its MARK is the theoretical arrival time, and what is charged moves it on.
-- Times are microseconds, days are those of UTC, and both are Redis' own: no gateway's clock matters. A mark
-- never moves back behind the present, so a command that comes late cannot fill an account twice.
local RATE, DAY, SLOTS = 1, 2, 3
local MINUTE_US, DAY_US = 60000000, 86400000000
local ACCOUNTS_LIVE_MS = 172800000 -- two days after their last change

-- A server that is full refuses what needs memory, unless the script has written already: the limits hold on,
-- since what they need is little.
redis.call('PEXPIRE', KEYS[1], ACCOUNTS_LIVE_MS)

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local today = math.floor(now / DAY_US)
local accounts, is_changed = {}, {}

-- What of a request a limit counts: 0 the request itself, 1 input tokens, 2 output tokens, 3 both.
local function amount(counts, input, output)
  if counts == 0 then return 1 end
  return (counts ~= 2 and input or 0) + (counts ~= 1 and output or 0)
end

local function account(field)
  local found = accounts[field]
  if not found then
    local text = redis.call('HGET', KEYS[1], field)
    found = {0, 0}
    if text then
      local first, second = string.match(text, '^(%S+) (%S+)$')
      found = {tonumber(first), tonumber(second)}
    end
    accounts[field] = found
  end
  return found
end

-- Returns what settling needs to know: mark and refunds of a rate, day and use of a quota.
local function charge(kind, field, limit, cost)
  local its = account(field)
  is_changed[field] = true
  if kind == DAY then
    if its[1] < today then its[1], its[2] = today, 0 end
    its[2] = its[2] + cost
  else
    its[1] = math.max(its[1], now) + cost * MINUTE_US / limit
  end
  return its[1], its[2]
end

-- Only what has not run off by itself can be given back: the rest has been room for others already. A charge
-- runs off until its mark, less what was given back since, which may have been of those before it.
local function refund(kind, field, limit, cost, mark, refunded)
  local its = account(field)
  if kind == DAY then
    if its[1] == mark then its[2] = math.max(0, its[2] - cost) end
  else
    local since = its[2] - refunded
    local outstanding = since < 0 and 0 or mark - since - now
    local back = math.min(cost * MINUTE_US / limit, outstanding)
    if back <= 0 then return end
    its[1], its[2] = its[1] - back, its[2] + back
  end
  is_changed[field] = true
end

-- Ends a reservation with what was used. Without that by rule: its prompt, and the output last reported.
-- Once it is gone this does nothing. Returns whether it was there.
local function settle(id, input, output)
  local stored = redis.call('HGET', KEYS[2], id)
  if not stored then return false end
  redis.call('HDEL', KEYS[2], id)
  redis.call('ZREM', KEYS[3], id)
  if stored == '' then return false end
  local reserved_input, reserved_output, reported, charges = unpack(cmsgpack.unpack(stored))
  if not input then input, output = reserved_input, reported end
  for _, each in ipairs(charges) do
    local kind, field, limit, counts, mark, refunded = unpack(each)
    local more = amount(counts, input, output) - amount(counts, reserved_input, reserved_output)
    if more > 0 then charge(kind, field, limit, more) end
    if more < 0 then refund(kind, field, limit, -more, mark, refunded) end
  end
  return true
end

local function sweep(at_most)
  local ids = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, at_most)
  for _, id in ipairs(ids) do
    settle(id)
    redis.call('ZREM', KEYS[3], id) -- also where the reservation has been lost
  end
  return #ids
end

local function as_text(number) return string.format('%.17g', number) end

local function keep(id, stored, lifetime)
  redis.call('HSET', KEYS[2], id, stored)
  redis.call('ZADD', KEYS[3], as_text(now + lifetime), id)
end

local function write_accounts()
  local pairs_to_write = {}
  for field in pairs(is_changed) do
    local its = accounts[field]
    pairs_to_write[#pairs_to_write + 1] = field
    pairs_to_write[#pairs_to_write + 1] = as_text(its[1]) .. ' ' .. as_text(its[2])
  end
  if #pairs_to_write > 0 then redis.call('HSET', KEYS[1], unpack(pairs_to_write)) end
  for index = 1, 3 do redis.call('PEXPIRE', KEYS[index], ACCOUNTS_LIVE_MS) end
end
