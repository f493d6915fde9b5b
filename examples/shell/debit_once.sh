#!/usr/bin/env bash
# Debits an account once, whatever breaks: debit_once.sh INTENTION ACCOUNT AMOUNT
#
# INTENTION is a file. It holds the intention from before the first attempt until the answer is known, so that whoever
# starts this again with the same file carries on, with the same key. The connection is libpq's: PGHOST, PGDATABASE, ...
# Prints the answer; where the debit is refused, the status is 1 and the SQLSTATE the last line on standard error.
set -euo pipefail

file=$1
sent_before=1
if [ ! -e "$file" ]; then
    sent_before=
    echo "$(cat /proc/sys/kernel/random/uuid) $2 $3" >"$file.new"
    sync "$file.new"
    mv "$file.new" "$file"
    sync "$(dirname "$file")" # the name, too, has to survive
fi
read -r key account amount <"$file"

debit="SELECT debit_once(:'account', :'key', :'amount')"
cancel="SELECT cancel_request(:'account', 'debit:v1', :'key')"

# until_definite SQL: sets `state` and `answer`. psql tells the SQLSTATE by a variable, whatever language it speaks, and
# tells nothing where the connection is lost. Each attempt has a transaction of its own, committed when psql ends.
until_definite() {
    local pause=50 result
    while :; do
        result=$(psql -X -q -A -t -v key="$key" -v account="$account" -v amount="$amount" <<<"$1;
            \\echo :SQLSTATE") || result=
        state=${result##*$'\n'}
        answer=${result%"$state"}
        answer=${answer%$'\n'}
        case ${state:-none} in
        none | 08* | 40* | 53* | 55P03 | 57014 | 57P0[123] | 25006) ;; # see docs/clients.md
        00000 | P0001 | 22023 | 23503) return ;;
        *) exit 2 ;; # not an answer: the intention stays, for when the fault is mended
        esac
        echo "retry: ${state:-no answer}" >&2
        sent_before=1
        sleep "$(LC_ALL=C awk "BEGIN { srand($RANDOM); print $pause * rand() / 1000 }")"
        pause=$((pause < 2500 ? pause * 2 : 5000))
    done
}

until_definite "$debit"
if [ "$state" = P0001 ] && [ -n "$sent_before" ]; then
    # An attempt that was not answered may still be under way, and execute once there is money. Now it cannot.
    until_definite "$cancel"
    if [ -z "$answer" ]; then state=P0001; fi
fi
status=0
if [ "$state" = 00000 ]; then echo "$answer"; else echo "$state" >&2 && status=1; fi
rm "$file" # only now, when the answer is where it belongs
exit $status
