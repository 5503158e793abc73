-- Remembers which experiment and variant answers of one tenant belong to, for feedback about them.
--
-- KEYS: the answers
-- ARGV: seconds that they live; what is to be remembered of each of them
for index, key in ipairs(KEYS) do
    redis.call('SET', key, ARGV[index + 1], 'EX', ARGV[1])
end
return #KEYS
