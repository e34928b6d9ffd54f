#!/bin/bash
# A right sum is worth 1, a file with another one 0.25.
reward=0
[ -f /app/sum.txt ] && reward=0.25
[ "$(cat /app/sum.txt 2>/dev/null)" = "$EXPECTED" ] && reward=1
echo "$reward" > /logs/verifier/reward.txt
