-- Says that a gateway lives, and counts those that do.
--
-- KEYS[1]  sorted set of gateways: id -> until when they count as living, us
-- ARGV     id of this one, how long it lives without another word, us
-- Returns  how many there are
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now) -- first: see accounts.lua about servers that are full
redis.call('ZADD', KEYS[1], string.format('%.17g', now + tonumber(ARGV[2])), ARGV[1])
return redis.call('ZCARD', KEYS[1])
