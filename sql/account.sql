CREATE TABLE account (
    account_id bigint NOT NULL,
    balance    bigint NOT NULL,
    CONSTRAINT account_pkey PRIMARY KEY (account_id),
    CONSTRAINT account_balance_check CHECK (balance >= 0)
);

COMMENT ON TABLE account IS
    'Accounts that debit_once takes from, in integer units of money. It demonstrates the pattern and is no ledger.';
COMMENT ON COLUMN account.account_id IS
    'Identifies the account. Chosen by the application.';
COMMENT ON COLUMN account.balance IS
    'What the account holds, in integer units such as cents; never below zero.';
COMMENT ON CONSTRAINT account_pkey ON account IS
    'One balance an account.';
COMMENT ON CONSTRAINT account_balance_check ON account IS
    'Last line of defence: debit_once refuses an insufficient balance before this constraint is reached.';

SELECT pg_catalog.pg_extension_config_dump('account', '');
