-- Takes one request of a tenant's rate and one concurrency slot: both or neither.
--
-- KEYS[1]  theoretical arrival time of the rate limit (GCRA), microseconds
-- KEYS[2]  sorted set of slot ids, scored by when they expire, microseconds
-- ARGV     requests per minute (0: no limit), burst, slots (0: no limit), slot id, slot lifetime in us
-- Returns  {1, requests remaining (-1: no limit)} or {0, "rate" | "concurrency", wait in us}
--
-- Time is Redis' own: the clocks of the gateways do not matter.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local per_minute, burst, slots = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local slot_id, lifetime = ARGV[4], tonumber(ARGV[5])

local arrival, remaining, interval = nil, -1, 0
if per_minute > 0 then
  interval = 60000000 / per_minute
  local stored = tonumber(redis.call('GET', KEYS[1]) or '0')
  arrival = math.max(stored, now) + interval
  local wait = arrival - burst * interval - now
  if wait > 0 then return {0, 'rate', math.ceil(wait)} end
  remaining = math.floor((now + burst * interval - arrival) / interval + 0.000001)
end
if slots > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  if redis.call('ZCARD', KEYS[2]) >= slots then return {0, 'concurrency', 0} end
end
-- Nothing was taken above; from here on everything is.
if arrival then
  local lives_ms = math.ceil((arrival - now) / 1000) + 1
  redis.call('SET', KEYS[1], string.format('%.0f', arrival), 'PX', lives_ms)
end
if slots > 0 then
  redis.call('ZADD', KEYS[2], string.format('%.0f', now + lifetime), slot_id)
  redis.call('PEXPIRE', KEYS[2], math.ceil(lifetime / 1000))
end
return {1, remaining}
