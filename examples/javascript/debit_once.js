// Debits an account once, whatever breaks: node debit_once.js INTENTION ACCOUNT AMOUNT
//
// INTENTION is a file. It holds the intention from before the first attempt until the answer is known, so that whoever
// starts this again with the same file carries on, with the same key. The connection is libpq's: PGHOST, PGDATABASE, ...
// Prints the answer; where the debit is refused, the status is 1 and the SQLSTATE the last line on standard error.
'use strict'

const fs = require('node:fs')
const path = require('node:path')
const { randomUUID } = require('node:crypto')
const { backOff } = require('exponential-backoff')
const { Client, DatabaseError } = require('pg')

const DEBIT = { text: 'SELECT debit_once($1, $2, $3)::text AS answer', values: (i) => [i.account, i.key, i.amount] }
const CANCEL = { text: "SELECT cancel_request($1, 'debit:v1', $2)::text AS answer", values: (i) => [i.account, i.key] }

// The intention, and whether an earlier process may have sent it.
function loadOrCreate(file, account, amount) {
  if (fs.existsSync(file)) return [JSON.parse(fs.readFileSync(file, 'utf8')), true]
  // Numbers stay text: a bigint does not fit a JavaScript number.
  const intention = { key: randomUUID(), account, amount }
  fs.writeFileSync(`${file}.new`, JSON.stringify(intention))
  const written = fs.openSync(`${file}.new`, 'r')
  fs.fsyncSync(written)
  fs.closeSync(written)
  fs.renameSync(`${file}.new`, file)
  const directory = fs.openSync(path.dirname(file), 'r')
  fs.fsyncSync(directory) // the name, too, has to survive
  fs.closeSync(directory)
  return [intention, false]
}

function worthARetry(error) {
  // Not from the server: no connection, or none any more. See docs/clients.md.
  if (!(error instanceof DatabaseError)) return !(error instanceof TypeError || error instanceof RangeError)
  return /^(08|40|53)|^(55P03|57014|57P01|57P02|57P03|25006)$/.test(error.code)
}

let attempts = 0

async function attempt(statement, intention) {
  attempts += 1
  // Each attempt has a transaction of its own, committed when `query` returns.
  const client = new Client()
  client.on('error', () => {}) // a connection that breaks while it is idle must not end the process
  try {
    await client.connect()
    const { rows } = await client.query(statement.text, statement.values(intention))
    return rows[0].answer
  } finally {
    client.end().catch(() => {})
  }
}

function untilDefinite(statement, intention) {
  return backOff(() => attempt(statement, intention), {
    numOfAttempts: Infinity,
    startingDelay: 50,
    maxDelay: 5000,
    jitter: 'full',
    retry: (error) => {
      if (worthARetry(error)) console.error('retry:', error.message)
      return worthARetry(error)
    },
  })
}

async function main() {
  const [file, account, amount] = process.argv.slice(2)
  const [intention, sentBefore] = loadOrCreate(file, account, amount)
  let answer
  let refusal = null
  try {
    answer = await untilDefinite(DEBIT, intention)
  } catch (error) {
    // Otherwise not an answer: the intention stays, for when the fault is mended.
    if (!(error instanceof DatabaseError && ['P0001', '22023', '23503'].includes(error.code))) throw error
    refusal = error.code
    if (refusal === 'P0001' && (sentBefore || attempts > 1)) {
      // An attempt that was not answered may still be under way, and execute once there is money. Now it cannot.
      answer = await untilDefinite(CANCEL, intention)
      if (answer !== null) refusal = null
    }
  }
  if (refusal === null) console.log(answer)
  else console.error(refusal)
  fs.unlinkSync(file) // only now, when the answer is where it belongs
  process.exitCode = refusal === null ? 0 : 1
}

main()
