-- Reserves, for each of some requests, in all the accounts that it has: in all of them or in none.
--
-- ARGV[1]  msgpack of {lifetime of a lease in us, dimensions, requests}
--          dimension: {kind, field (or index of the key of its slots), limit, burst, counts, is enforced}
--          request: {id ('': there will be nothing to settle), input tokens, output tokens}
-- Returns  msgpack of {status, dimension, wait in us, shadows, figures} for each request, in their order
--          status 1: admitted; 0: refused by the dimension, for so long (-1: such a request is never admitted);
--          2: it was settled before this command has come. shadows: the dimensions that would have refused.
--          figures: what remains, and in how many us all of it will, of each dimension that is not of slots.
local SWEPT_AT_ONCE = 4
local A_MOMENT_US = 1000000 -- when a slot becomes free is not known

local lifetime, dimensions, requests = unpack(cmsgpack.unpack(ARGV[1]))
local num_taken = {} -- of each sorted set of slots

-- A hundredth of a unit is for the rounding of many charges at one instant.
local function wait_of_rate(field, limit, burst, cost)
  local interval = MINUTE_US / limit
  local wait = math.max(account(field)[1], now) + (cost - burst) * interval - now
  return wait > interval / 100 and math.ceil(wait) or 0
end

local function used_today(field)
  local its = account(field)
  return its[1] < today and 0 or its[2]
end

local function midnight(field)
  return (math.max(account(field)[1], today) + 1) * DAY_US - now
end

local function taken(index)
  if not num_taken[index] then
    redis.call('ZREMRANGEBYSCORE', KEYS[index], '-inf', now)
    num_taken[index] = redis.call('ZCARD', KEYS[index])
  end
  return num_taken[index]
end

-- 0: there is room; -1: there never will be; else how long to wait, in us.
local function wait_for(dimension, cost)
  local kind, field, limit, burst = unpack(dimension)
  if kind == SLOTS then return taken(field) >= limit and A_MOMENT_US or 0 end
  if cost == 0 then return 0 end
  if cost > burst then return -1 end
  if kind == RATE then return wait_of_rate(field, limit, burst, cost) end
  return used_today(field) + cost > limit and midnight(field) or 0
end

local function figures()
  local told = {}
  for _, dimension in ipairs(dimensions) do
    local kind, field, limit, burst = unpack(dimension)
    if kind == RATE then
      local ahead = math.max(account(field)[1] - now, 0)
      told[#told + 1] = math.max(math.floor(burst - ahead * limit / MINUTE_US + 0.01), 0)
      told[#told + 1] = math.ceil(ahead)
    elseif kind == DAY then
      told[#told + 1] = math.max(limit - used_today(field), 0)
      told[#told + 1] = midnight(field)
    end
  end
  return told
end

local function reserve(id, input, output)
  if id ~= '' then
    local stored = redis.call('HGET', KEYS[2], id)
    if stored then return {stored == '' and 2 or 1, 0, 0, {}, figures()} end -- a command that was sent twice
  end
  local refusing, longest, shadows, is_shadow = 0, 0, {}, {}
  for index, dimension in ipairs(dimensions) do
    local wait = wait_for(dimension, amount(dimension[5], input, output))
    if wait ~= 0 and dimension[6] == 0 then
      shadows[#shadows + 1] = index
      is_shadow[index] = true
    elseif wait == -1 and longest ~= -1 or wait > longest and longest ~= -1 then
      refusing, longest = index, wait
    end
  end
  if refusing > 0 then return {0, refusing, longest, shadows, figures()} end
  -- Nothing was taken above; from here on everything is.
  local charges = {}
  for index, dimension in ipairs(dimensions) do
    local kind, field, limit, _, counts = unpack(dimension)
    if is_shadow[index] then
      -- who would have been refused takes nothing from the others
    elseif kind == SLOTS then
      num_taken[field] = taken(field) + 1
      redis.call('ZADD', KEYS[field], as_text(now + lifetime), id)
    else
      local mark, refunded = charge(kind, field, limit, amount(counts, input, output))
      if counts > 0 then charges[#charges + 1] = {kind, field, limit, counts, mark, refunded} end
    end
  end
  if id ~= '' then keep(id, cmsgpack.pack({input, output, 0, charges}), lifetime) end
  return {1, 0, 0, shadows, figures()}
end

sweep(SWEPT_AT_ONCE)
local answers = {}
for number, request in ipairs(requests) do answers[number] = reserve(unpack(request)) end
write_accounts()
for index in pairs(num_taken) do redis.call('PEXPIRE', KEYS[index], math.ceil(lifetime / 1000)) end
return cmsgpack.pack(answers)
