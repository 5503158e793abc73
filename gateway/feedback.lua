-- Takes the score of one answer into the sums of its experiment, in the place of an earlier one of that answer.
-- Running it again with the same score changes nothing: whoever is not sure whether it ran may repeat it.
--
-- KEYS: the answer's score; the sums of the experiment; its comments
-- ARGV: the score in millionths; the field of the number of scores, and that of their sum; the response id;
--       the comment, or ''; seconds that the score lives; seconds that sums and comments live; most comments
local score = tonumber(ARGV[1])
local earlier = redis.call('GET', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[6])
if earlier then
    redis.call('HINCRBY', KEYS[2], ARGV[3], string.format('%d', score - tonumber(earlier)))
else
    redis.call('HINCRBY', KEYS[2], ARGV[2], 1)
    redis.call('HINCRBY', KEYS[2], ARGV[3], ARGV[1])
end
redis.call('EXPIRE', KEYS[2], ARGV[7])
if ARGV[5] == '' then
    redis.call('HDEL', KEYS[3], ARGV[4])
elseif redis.call('HEXISTS', KEYS[3], ARGV[4]) == 1 or redis.call('HLEN', KEYS[3]) < tonumber(ARGV[8]) then
    redis.call('HSET', KEYS[3], ARGV[4], ARGV[5])
    redis.call('EXPIRE', KEYS[3], ARGV[7])
end
return 1
