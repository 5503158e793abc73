-- Puts a new policy in the place of the one that its maker has read, and tells the audit of it: both or
-- neither. By Redis' clock, and not after the deadline: whoever got no answer knows from then on that what
-- has not happened yet never will.
--
-- KEYS: policy, audit stream
-- ARGV: the policy that was read ("" if there was none), the new one, the audit record, deadline in
--       microseconds since 1970, greatest length of the stream
-- Returns 1 if it was done, 0 if another policy is there by now, -1 if it is too late.
local time = redis.call('TIME')
if time[1] * 1000000 + time[2] > tonumber(ARGV[4]) then
  return -1
end
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[2])
-- A stream that cannot be written (somebody put another type there) must not turn a change that is made
-- into an error.
redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'record', ARGV[3])
return 1
