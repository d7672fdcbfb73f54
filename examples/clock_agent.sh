#!/bin/sh
# An agent that is a shell script: a question about times of the day, asked with curl, and asked once more where the reply holds no time.
#
#     sh clock_agent.sh --tasks > tasks.jsonl
#     tether train --agent-command 'sh clock_agent.sh' --tasks tasks.jsonl --model path/to/model --steps 40 --out runs/clock
#
# Tether starts it for every episode. It finds its task as JSON in the file $TETHER_TASK and the model behind $TETHER_BASE_URL, and prints its reward.

if [ "$1" = --tasks ]; then
    exec awk 'BEGIN {
        srand(1)
        for (n = 0; n < 1200; n++) {
            start = int(rand() * 1440); minutes = 20 + int(rand() * 220); end = (start + minutes) % 1440
            printf "{\"id\": \"trip %d\", \"question\": \"A train leaves at %02d:%02d and takes %d minutes. At what time of the day does it arrive?\", \"answer\": \"%02d:%02d\"}\n", n, start / 60, start % 60, minutes, end / 60, end % 60
        }
    }'
fi

field() { sed -n "s/.*\"$1\": *\"\(\([^\"\\\\]\|\\\\.\)*\)\".*/\1/p" "$2" | head -n 1; } # a text of a JSON file, as it stands there
question=$(field question "$TETHER_TASK")
answer=$(field answer "$TETHER_TASK")
reply=$(mktemp)
trap 'rm -f "$reply"' EXIT

system='{"role": "system", "content": "Work it out step by step, in few words. End with the time of the day as HH:MM."}'
messages="$system, {\"role\": \"user\", \"content\": \"$question\"}"
for attempt in 1 2; do
    curl --silent --show-error --fail --noproxy '*' -H 'Content-Type: application/json' -H "Authorization: Bearer $TETHER_API_KEY" \
        -d "{\"model\": \"$TETHER_MODEL\", \"max_tokens\": 200, \"messages\": [$messages]}" \
        "$TETHER_BASE_URL/chat/completions" > "$reply" || exit 1
    said=$(field content "$reply")
    time=$(printf '%s' "$said" | grep -o '[0-9][0-9]*:[0-9][0-9]' | tail -n 1)
    [ -n "$time" ] && break
    messages="$messages, {\"role\": \"assistant\", \"content\": \"$said\"}, {\"role\": \"user\", \"content\": \"Reply with the time as HH:MM.\"}"
done
if [ "$time" = "$answer" ]; then echo '{"reward": 1.0}'; else echo '{"reward": 0.0}'; fi
