-- Appends a batch of usage rows, once: who gets no answer sends the same batch again.
--
-- KEYS: usage stream, number of this gateway's last batch
-- ARGV: rough greatest length of the stream, number of this batch, lifetime of that number in seconds, rows
-- Returns how many rows were appended.
if tonumber(ARGV[2]) <= tonumber(redis.call('GET', KEYS[2]) or '0') then
  return 0
end
for index = 4, #ARGV do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'row', ARGV[index])
end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
return #ARGV - 3
