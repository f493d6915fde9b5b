//! Who may do what: `docs/security.md` against the catalogue, tenants who try to reach one another, attacks that must have no
//! effect, and records that stay as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::LazyLock;

use client_tests::{
    Cluster, balance, contents, debit, major, outcome, report, simple, sqlstate, value, wait_until, wait_until_blocked,
};
use postgres::{Client, Config, NoTls};

static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| Cluster::start(&["wal_level=logical", "max_wal_senders=10"]));

/// The functions that an application and a consumer call.
const CALLED: &str = "debit_once(bigint, text, bigint), debit_once(bigint, text, bigint, timestamptz),
    debit_once_outcome(bigint, text, bigint), debit_once_outcome(bigint, text, bigint, timestamptz),
    credit_once(bigint, text, bigint), credit_once(bigint, text, bigint, timestamptz),
    credit_once_outcome(bigint, text, bigint), credit_once_outcome(bigint, text, bigint, timestamptz),
    run_once(bigint, text, text, jsonb, regprocedure), run_once(bigint, text, text, jsonb, regprocedure, timestamptz),
    run_once_outcome(bigint, text, text, jsonb, regprocedure),
    run_once_outcome(bigint, text, text, jsonb, regprocedure, timestamptz),
    cancel_request(bigint, text, text), find_request(bigint, text, text),
    accept_message(text, uuid, bigint, jsonb), apply_message_once(text, uuid, bigint, bigint, jsonb),
    accept_messages(text, uuid[], bigint[], jsonb[]), accept_version(text, text, bigint),
    debit_batch_once(bigint[], text[], bigint[]), credit_batch_once(bigint[], text[], bigint[])";

/// The objects of the extension; row types and array types are not listed on every major.
const MEMBERS: &str = "
    SELECT d.classid, d.objid FROM pg_depend AS d JOIN pg_extension AS e ON d.refobjid = e.oid
     WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'idempotency_record'
       AND d.classid <> 'pg_type'::regclass";

/// A database with the extension, whose accounts 1 and 2 hold 1000 each, and roles of its own.
struct Bank {
    database: String,
}

impl Bank {
    fn new() -> Self {
        let bank = Self { database: CLUSTER.database() };
        bank.superuser()
            .batch_execute(
                "INSERT INTO account VALUES (1, 1000), (2, 1000);
                 CREATE FUNCTION echo(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2'",
            )
            .expect("accounts");
        bank
    }

    /// The name of a role of this database's own.
    fn role(&self, name: &str) -> String {
        format!("{}_{name}", self.database)
    }

    /// Makes roles that can log in and call the functions.
    fn callers(&self, names: &[&str]) {
        let mut superuser = self.superuser();
        for name in names {
            let role = self.role(name);
            superuser
                .batch_execute(&format!("CREATE ROLE {role} LOGIN; GRANT EXECUTE ON FUNCTION {CALLED} TO {role}"))
                .expect("a role");
        }
    }

    fn superuser(&self) -> Client {
        CLUSTER.connect_to(&self.database)
    }

    /// A session of the role itself, not of a superuser who has set it.
    fn session(&self, name: &str) -> Client {
        Config::new()
            .host_path(CLUSTER.directory())
            .user(&self.role(name))
            .dbname(&self.database)
            .options("-c statement_timeout=60s")
            .connect(NoTls)
            .expect("a session")
    }

    /// Runs SQL in which `@name@` stands for a role of this database's own, as a superuser.
    fn run(&self, sql: &str) {
        self.superuser().batch_execute(&self.named(sql)).unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }

    fn named(&self, sql: &str) -> String {
        let mut text = String::new();
        for (i, part) in sql.split('@').enumerate() {
            text += &if i % 2 == 1 { self.role(part) } else { part.to_owned() };
        }
        text
    }
}

/// Everything that the extension's tables hold.
fn everything(client: &mut Client) -> String {
    let others = "SELECT concat((SELECT string_agg(v::text, ' ' ORDER BY v.subscriber, v.entity) FROM accepted_version AS v), '--',
                                (SELECT string_agg(f::text, ' ' ORDER BY f.kind, f.name) FROM retention_fence AS f))";
    format!("{}\n--\n{}", contents(client), value(client, others))
}

/// SQL that a client sends outside a transaction.
fn got(client: &mut Client, sql: &str) -> String {
    outcome(simple(client, sql))
}

/// Runs one statement that returns nothing.
fn done(client: &mut Client, sql: &str) -> String {
    match client.batch_execute(sql) {
        Ok(()) => "done".into(),
        Err(error) => sqlstate(&error).to_owned(),
    }
}

// ---- docs/security.md against the catalogue ------------------------------------------------------------------------

fn document() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the root of the repository");
    std::fs::read_to_string(root.join("docs/security.md")).expect("docs/security.md")
}

/// The part of the document under this heading, up to the next one of the same level.
fn section<'a>(markdown: &'a str, heading: &str) -> &'a str {
    let start = markdown.find(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no section {heading}"));
    let rest = &markdown[start + 4..];
    rest.find("\n## ").map_or(rest, |end| &rest[..end])
}

/// The objects that the document lists: identity and kind, to who has which privileges.
fn listed() -> BTreeMap<(String, String), BTreeMap<String, BTreeSet<String>>> {
    let markdown = document();
    let mut listed = BTreeMap::new();
    for line in section(&markdown, "Objects").lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [object, kind, grants, why] = cells[..] else { panic!("not four cells: {line}") };
        assert!(!why.is_empty(), "no reason: {line}");
        let mut granted = BTreeMap::new();
        for grant in grants.split(';').map(str::trim).filter(|&grant| grant != "nobody") {
            let (role, privileges) = grant.split_once(": ").unwrap_or_else(|| panic!("not `role: privileges`: {line}"));
            let privileges = privileges.split(", ").map(str::to_owned).collect();
            granted.insert(role.trim_matches('`').to_owned(), privileges);
        }
        let known = listed.insert((object.trim_matches('`').to_owned(), kind.to_owned()), granted);
        assert!(known.is_none(), "listed twice: {line}");
    }
    listed
}

/// The objects of the extension as the document writes them.
fn catalogued(client: &mut Client) -> BTreeSet<(String, String)> {
    let sql = format!(
        "WITH member AS ({MEMBERS})
         SELECT relname::text, CASE relkind WHEN 'r' THEN 'table' WHEN 'v' THEN 'view' ELSE relkind::text END
           FROM member JOIN pg_class AS c ON classid = 'pg_class'::regclass AND objid = c.oid
         UNION ALL
         SELECT proname || '(' || replace(oidvectortypes(proargtypes), 'timestamp with time zone', 'timestamptz') || ')',
                CASE WHEN prorettype = 'trigger'::regtype THEN 'trigger function' WHEN prokind = 'p' THEN 'procedure'
                     WHEN prokind = 'f' THEN 'function' ELSE prokind::text END
           FROM member JOIN pg_proc AS p ON classid = 'pg_proc'::regclass AND objid = p.oid
         UNION ALL
         SELECT pg_describe_object(classid, objid, 0), 'other' FROM member
          WHERE classid NOT IN ('pg_class'::regclass, 'pg_proc'::regclass)"
    );
    client.query(&sql, &[]).expect("the catalogue").iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[test]
fn the_document_lists_every_object_and_no_other() {
    let objects = catalogued(&mut Bank::new().superuser());
    assert!(objects.len() > 30, "{objects:?}");
    let listed: BTreeSet<_> = listed().into_keys().collect();
    let missing: Vec<_> = objects.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(&objects).collect();
    assert!(missing.is_empty() && gone.is_empty(), "not listed: {missing:?}\nlisted, but not there: {gone:?}");
}

#[test]
fn the_roles_of_the_document_have_what_its_table_says_and_no_more() {
    // A cluster of its own, since the roles have the names that the document gives them.
    let cluster = Cluster::start(&[]);
    let database = cluster.empty_database("");
    let markdown = document();
    for part in ["The model", "Roles"] {
        let blocks = section(&markdown, part).split("```").skip(1).step_by(2);
        for block in blocks.filter_map(|block| block.strip_prefix("sql\n")).take(1) {
            cluster.connect_to(&database).batch_execute(block).unwrap_or_else(|error| panic!("{block}: {error:?}"));
        }
    }
    let mut client = cluster.connect_to(&database);
    client.batch_execute("SET search_path = bank").expect("the schema");
    let sql = format!(
        "WITH member AS ({MEMBERS}), granted AS (
             SELECT relname::text AS object, a.grantee, a.privilege_type
               FROM member JOIN pg_class AS c ON classid = 'pg_class'::regclass AND objid = c.oid,
                    aclexplode(coalesce(relacl, acldefault('r', relowner))) AS a
             UNION ALL
             SELECT proname || '(' || replace(oidvectortypes(proargtypes), 'timestamp with time zone', 'timestamptz') || ')',
                    a.grantee, a.privilege_type
               FROM member JOIN pg_proc AS p ON classid = 'pg_proc'::regclass AND objid = p.oid,
                    aclexplode(coalesce(proacl, acldefault('f', proowner))) AS a)
         SELECT object, CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END, privilege_type FROM granted
          WHERE grantee <> 'postgres'::regrole"
    );
    let mut granted = BTreeMap::<String, BTreeMap<String, BTreeSet<String>>>::new();
    for row in client.query(&sql, &[]).expect("the grants") {
        granted.entry(row.get(0)).or_default().entry(row.get(1)).or_default().insert(row.get(2));
    }
    for ((object, _), expected) in listed() {
        assert_eq!(granted.remove(&object).unwrap_or_default(), expected, "{object}");
    }
    assert!(granted.is_empty(), "{granted:?}");
}

#[test]
fn public_has_nothing_also_where_default_privileges_would_give_it() {
    let database = CLUSTER.empty_database("");
    let mut client = CLUSTER.connect_to(&database);
    client
        .batch_execute(
            "ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO PUBLIC;
             ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO PUBLIC;
             ALTER DEFAULT PRIVILEGES GRANT ALL ON TYPES TO PUBLIC;
             CREATE TABLE given (); CREATE FUNCTION given() RETURNS int LANGUAGE sql AS 'SELECT 1';
             CREATE EXTENSION idempotency_record",
        )
        .expect("CREATE EXTENSION");
    let public = |objects: &str| {
        format!(
            "WITH member (classid, objid) AS ({objects}), acl AS (
                 SELECT objid::regclass::text AS object, coalesce(relacl, acldefault('r', relowner)) AS acl
                   FROM member JOIN pg_class AS c ON classid = 'pg_class'::regclass AND objid = c.oid
                 UNION ALL SELECT attrelid::regclass || '.' || attname, attacl
                   FROM member JOIN pg_attribute ON classid = 'pg_class'::regclass AND objid = attrelid
                 UNION ALL SELECT objid::regprocedure::text, coalesce(proacl, acldefault('f', proowner))
                   FROM member JOIN pg_proc AS p ON classid = 'pg_proc'::regclass AND objid = p.oid)
             SELECT coalesce(string_agg(DISTINCT object, ', ' ORDER BY object), 'none') FROM acl, aclexplode(acl) WHERE grantee = 0"
        )
    };
    let control = "SELECT 'pg_class'::regclass::oid, 'given'::regclass::oid UNION SELECT 'pg_proc'::regclass, 'given()'::regprocedure";
    assert_eq!(value(&mut client, &public(control)), "given, given()");
    assert_eq!(value(&mut client, &public(MEMBERS)), "none");
}

// ---- tenants -------------------------------------------------------------------------------------------------------

/// How the database knows the tenant; the three set-ups of docs/security.md.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Setup {
    Role,
    Setting,
    Claims,
}

impl Setup {
    const ALL: [Self; 3] = [Self::Role, Self::Setting, Self::Claims];

    /// A database where account 1 is the tenant's a, account 2 the tenant's b.
    fn bank(self) -> Bank {
        let bank = Bank::new();
        match self {
            Self::Role => bank.callers(&["a", "b", "c"]),
            Self::Setting => bank.callers(&["app"]),
            Self::Claims => {
                bank.callers(&["web_user"]);
                bank.run("CREATE ROLE @authenticator@ LOGIN NOINHERIT; GRANT @web_user@ TO @authenticator@");
            }
        }
        let (callers, tenant) = match self {
            Self::Role => ("@a@, @b@, @c@", "current_user::text"),
            Self::Setting => ("@app@", "current_setting('app.tenant', true)"),
            Self::Claims => {
                ("@web_user@", "(nullif(current_setting('request.jwt.claims', true), '')::json ->> 'tenant')")
            }
        };
        bank.run(&format!(
            "CREATE TABLE account_tenant (account_id bigint PRIMARY KEY REFERENCES account, tenant text NOT NULL CHECK (tenant <> ''));
             INSERT INTO account_tenant VALUES (1, '{}'), (2, '{}');
             ALTER TABLE account_tenant ENABLE ROW LEVEL SECURITY;
             CREATE POLICY own ON account_tenant FOR SELECT USING (tenant = {tenant});
             GRANT SELECT ON account_tenant TO {callers};
             CREATE POLICY own ON account
              USING (EXISTS (SELECT FROM account_tenant AS t WHERE t.account_id = account.account_id AND t.tenant = {tenant}));
             ALTER TABLE account ENABLE ROW LEVEL SECURITY",
            self.tenant(&bank, "a"),
            self.tenant(&bank, "b"),
        ));
        bank
    }

    fn tenant(self, bank: &Bank, name: &str) -> String {
        if self == Self::Role { bank.role(name) } else { name.to_owned() }
    }

    /// A session for a tenant, or one of the middleware, which serves all of them.
    fn session(self, bank: &Bank, tenant: &str) -> Client {
        match self {
            Self::Role => bank.session(tenant),
            Self::Setting => bank.session("app"),
            Self::Claims => bank.session("authenticator"),
        }
    }

    /// What the middleware sends at the beginning of a transaction.
    fn beginning(self, bank: &Bank, tenant: &str) -> String {
        let role = bank.role("web_user");
        match (self, tenant) {
            (Self::Role, _) | (Self::Setting, "c") => String::new(),
            (Self::Setting, _) => format!("SET LOCAL app.tenant = '{tenant}'"),
            (Self::Claims, "c") => format!("SET LOCAL ROLE {role}"),
            (Self::Claims, _) => {
                format!(
                    "SET LOCAL ROLE {role}; SET LOCAL request.jwt.claims = '{{\"sub\": 7, \"tenant\": \"{tenant}\"}}'"
                )
            }
        }
    }
}

/// A tenant's session: `c` is a tenant who has no account, or whom nobody named.
struct Tenant<'a> {
    bank: &'a Bank,
    setup: Setup,
    name: &'a str,
    client: Client,
}

impl<'a> Tenant<'a> {
    fn new(setup: Setup, bank: &'a Bank, name: &'a str) -> Self {
        Self { bank, setup, name, client: setup.session(bank, name) }
    }

    /// Sends SQL in a transaction of its own; the error whole, where it is refused.
    fn send(&mut self, mode: &str, sql: &str) -> Result<String, postgres::Error> {
        let beginning = self.setup.beginning(self.bank, self.name);
        self.client.batch_execute(&format!("BEGIN {mode}; {beginning}")).expect("BEGIN");
        let result = simple(&mut self.client, sql);
        self.client.batch_execute(if result.is_ok() { "COMMIT" } else { "ROLLBACK" }).expect("the end");
        result
    }

    fn call(&mut self, sql: &str) -> String {
        outcome(self.send("", sql))
    }
}

/// A key that was made, by its own account, before the fence that [`prepare`] sets.
const EXPIRED: &str = "017f22e2-79b0-7cc3-98c4-dc0c0c07398f";

/// Each function that takes an account, and an array of accounts of which one is the caller's own.
fn calls(account: i64, own: i64, key: &str) -> Vec<String> {
    let mut calls = Vec::new();
    for dated in ["", ", now()", ", NULL"] {
        for function in ["debit_once", "credit_once"] {
            calls.push(format!("SELECT {function}({account}, '{key}', 10{dated})::text"));
            calls.push(format!("SELECT response::text FROM {function}_outcome({account}, '{key}', 10{dated})"));
        }
        let arguments = format!("{account}, 'pay:v1', '{key}', '{{\"n\": 1}}', 'echo(bigint, jsonb)'{dated}");
        calls.push(format!("SELECT run_once({arguments})::text"));
        calls.push(format!("SELECT response::text FROM run_once_outcome({arguments})"));
    }
    for operation in ["debit:v1", "credit:v1", "pay:v1"] {
        calls.push(format!("SELECT cancel_request({account}, '{operation}', '{key}')::text"));
        calls.push(format!("SELECT count(*) FROM find_request({account}, '{operation}', '{key}')"));
    }
    let id = if key == EXPIRED { format!("'{key}'::uuid") } else { format!("md5('{key}')::uuid") };
    for payload in ["", ", '{}'", ", '1'"] {
        calls.push(format!("SELECT accept_message('s', {id}, {account}{payload})"));
        calls.push(format!("SELECT apply_message_once('s', {id}, {account}, 5{payload})"));
    }
    for payloads in ["", ", '{1, 2}'"] {
        let arrays = |ids: &str, accounts: &str| {
            format!("SELECT count(*) FROM accept_messages('s', {ids}, {accounts}{payloads})")
        };
        let own_id = format!("md5('own {key}')::uuid");
        calls.push(arrays(&format!("ARRAY[{id}, {id}]"), &format!("ARRAY[{account}, {account}]::bigint[]")));
        calls.push(arrays(&format!("ARRAY[{own_id}, {id}]"), &format!("ARRAY[{own}, {account}]::bigint[]")));
        calls.push(arrays(&format!("ARRAY[{id}, {own_id}]"), &format!("ARRAY[{account}, {own}]::bigint[]")));
    }
    calls
}

/// What tenant b has done with account 2 before anybody tries to reach it.
fn prepare(bank: &Bank, b: &mut Tenant<'_>) {
    for call in [
        "debit_once(2, 'known', 10)::text",
        "credit_once(2, 'known', 10)::text",
        "run_once(2, 'pay:v1', 'known', '{\"n\": 1}', 'echo(bigint, jsonb)')::text",
        "debit_once(2, 'other', 11)::text",
        "credit_once(2, 'other', 11)::text",
        "run_once(2, 'pay:v1', 'other', '{\"n\": 2}', 'echo(bigint, jsonb)')::text",
        "cancel_request(2, 'debit:v1', 'cancelled')::text",
        "cancel_request(2, 'credit:v1', 'cancelled')::text",
        "cancel_request(2, 'pay:v1', 'cancelled')::text",
        "accept_message('s', md5('known')::uuid, 2, '{}')",
        "apply_message_once('s', md5('other')::uuid, 2, 6)",
    ] {
        let answer = b.call(&format!("SELECT {call}"));
        assert!(answer.starts_with("done: "), "{call}: {answer}");
    }
    bank.run(
        "INSERT INTO retention_fence SELECT kind, name, now() - interval '1 day'
           FROM (VALUES ('operation', 'debit:v1'), ('operation', 'credit:v1'), ('operation', 'pay:v1'), ('subscriber', 's')) AS given (kind, name)",
    );
}

#[test]
fn no_tenant_reaches_another_through_any_function() {
    for setup in Setup::ALL {
        let bank = setup.bank();
        let mut superuser = bank.superuser();
        prepare(&bank, &mut Tenant::new(setup, &bank, "b"));
        let before = everything(&mut superuser);
        for name in ["a", "c"] {
            let mut tenant = Tenant::new(setup, &bank, name);
            for key in ["known", "other", "cancelled", "unknown", EXPIRED] {
                for (existing, missing) in calls(2, 1, key).into_iter().zip(calls(404, 1, key)) {
                    for mode in ["", "READ ONLY", "ISOLATION LEVEL SERIALIZABLE"] {
                        let existing = report(tenant.send(mode, &existing));
                        let missing = report(tenant.send(mode, &missing));
                        assert_eq!(existing.code().code(), "42501", "{setup:?} {name} {mode}: {existing:?}");
                        // No difference but the number tells whether there is such an account.
                        let [existing, missing] = [existing, missing].map(|error| {
                            let text = format!("{} {:?} {:?}", error.message(), error.detail(), error.hint());
                            text.replace("account 404", "account 2").replace("account 1", "account 2")
                        });
                        assert_eq!(existing, missing, "{setup:?} {name} {mode}");
                    }
                }
            }
            assert_eq!(everything(&mut superuser), before, "{setup:?} {name}");
        }
    }
}

#[test]
fn a_batch_refuses_the_accounts_of_others_and_executes_ones_own() {
    for setup in Setup::ALL {
        let bank = setup.bank();
        let mut superuser = bank.superuser();
        prepare(&bank, &mut Tenant::new(setup, &bank, "b"));
        let before = everything(&mut superuser);
        let batch = |function: &str, accounts: &str| {
            format!(
                "SELECT string_agg(concat_ws(' ', response, replayed, sqlstate, message), ', ' ORDER BY ordinal)
                   FROM {function}({accounts}, ARRAY['known', 'known', 'other', 'cancelled', 'unknown', '{EXPIRED}', 'unknown'], '{{10, 11, 11, 1, 1, 1, 1}}')"
            )
        };
        for name in ["a", "c"] {
            let mut tenant = Tenant::new(setup, &bank, name);
            for function in ["debit_batch_once", "credit_batch_once"] {
                for mode in ["", "READ ONLY", "ISOLATION LEVEL SERIALIZABLE"] {
                    let got = |tenant: &mut Tenant<'_>, account: i64| {
                        let accounts = format!("array_fill({account}::bigint, ARRAY[7])");
                        outcome(tenant.send(mode, &batch(function, &accounts)))
                    };
                    let denied = ["f 42501 permission denied for account 2"; 7].join(", ");
                    assert_eq!(got(&mut tenant, 2), format!("done: {denied}"), "{setup:?} {name} {mode}");
                    // No difference but the number tells whether there is such an account.
                    assert_eq!(got(&mut tenant, 404), format!("done: {}", denied.replace("account 2", "account 404")));
                }
            }
            assert_eq!(everything(&mut superuser), before, "{setup:?} {name}");
        }
        let mut a = Tenant::new(setup, &bank, "a");
        let mixed = batch("debit_batch_once", "'{1, 2, 404, 1, 1, 2, 2}'");
        let [of_2, of_404] = [2, 404].map(|account| format!("f 42501 permission denied for account {account}"));
        let own = |replayed: &str| {
            format!(
                r#"done: {{"balance": 990}} {replayed}, {of_2}, {of_404}, {{"balance": 989}} {replayed}, {{"balance": 988}} {replayed}, {of_2}, {of_2}"#
            )
        };
        assert_eq!(a.call(&mixed), own("f"), "{setup:?}");
        assert_eq!(a.call(&mixed), own("t"), "{setup:?}");
        assert_eq!(outcome(a.send("READ ONLY", &mixed)), own("t"), "{setup:?}");
        // An account that may be seen and not used: what is known is answered, and what is new refused.
        bank.run("CREATE POLICY seen ON account AS RESTRICTIVE FOR UPDATE USING (account_id <> 1)");
        let accounts = "'{1, 2, 404, 1, 1, 2, 1}'";
        let new = batch("debit_batch_once", accounts).replace("'known'", "'new'").replace("'cancelled'", "'known'");
        let new = new.replace("{10, 11, 11, 1,", "{10, 11, 11, 10,");
        let of_1 = "f 42501 permission denied for account 1";
        let expected = format!(
            r#"done: {of_1}, {of_2}, {of_404}, {{"balance": 990}} t, {{"balance": 988}} t, {of_2}, {{"balance": 988}} t"#
        );
        assert_eq!(a.call(&new), expected, "{setup:?}");
    }
}

#[test]
fn a_tenant_uses_its_own_account_and_repeats_its_own_requests() {
    for setup in Setup::ALL {
        let bank = setup.bank();
        let mut superuser = bank.superuser();
        prepare(&bank, &mut Tenant::new(setup, &bank, "b"));
        let mut a = Tenant::new(setup, &bank, "a");
        // The keys of b's account are free for a's; so are its messages to another subscriber.
        let own: Vec<_> = calls(1, 1, "known").into_iter().map(|call| call.replace("'s'", "'t'")).collect();
        let first: Vec<_> = own.iter().map(|call| a.call(call)).collect();
        let refused: Vec<_> = own.iter().zip(&first).filter(|(_, answer)| !answer.starts_with("done: ")).collect();
        assert!(refused.is_empty(), "{setup:?} {refused:?}");
        assert_eq!(balance(&mut superuser, 1), 1000);
        let after = everything(&mut superuser);
        let again: Vec<_> = own.iter().map(|call| a.call(call)).collect();
        assert_eq!(everything(&mut superuser), after, "{setup:?}: a repeat writes nothing");
        let read_only: Vec<_> = own.iter().map(|call| outcome(a.send("READ ONLY", call))).collect();
        assert_eq!(again, read_only, "{setup:?}");
        assert_eq!(again[0], r#"done: {"balance": 990}"#);
        // A message is its subscriber's, whoever sent it: a known id of another account says that it is known.
        assert_eq!(a.call("SELECT accept_message('s', md5('known')::uuid, 1)"), "22023", "{setup:?}");
        assert_eq!(a.call("SELECT accept_version('s', 'order', 1)"), "done: t");
        assert_eq!(Tenant::new(setup, &bank, "b").call("SELECT accept_version('s', 'order', 1)"), "done: f");
    }
}

#[test]
fn a_tenant_has_neither_the_tables_nor_what_was_not_granted() {
    for setup in Setup::ALL {
        let bank = setup.bank();
        prepare(&bank, &mut Tenant::new(setup, &bank, "b"));
        let before = everything(&mut bank.superuser());
        let mut a = Tenant::new(setup, &bank, "a");
        for sql in [
            "SELECT purge_expired_keys()",
            "SELECT purge_expired_keys('0')",
            "SELECT purge_processed_messages()",
            "SELECT purge_processed_messages('0')",
            "SELECT request_fingerprint('{}')",
            "SELECT retention_setting()",
            "SELECT keep_record()",
            "TABLE retention_status",
            "TABLE account",
            "TABLE request_result",
            "TABLE processed_message",
            "TABLE operation_policy",
            "TABLE retention_fence",
            "SELECT * FROM account WHERE account_id = 1 FOR UPDATE",
            "INSERT INTO request_result VALUES (1, 'debit:v1', 'forged', '{}', '{}') RETURNING 1",
            "UPDATE account SET balance = 5 RETURNING 1",
            "DELETE FROM request_result RETURNING 1",
            "DELETE FROM retention_fence RETURNING 1",
        ] {
            assert_eq!(a.call(sql), "42501", "{setup:?}: {sql}");
        }
        let role = setup.beginning(&bank, "a");
        a.client.batch_execute(&role.replace("LOCAL", "SESSION")).expect("the role");
        assert_eq!(done(&mut a.client, "CALL purge()"), "42501", "{setup:?}");
        assert_eq!(everything(&mut bank.superuser()), before, "{setup:?}");
    }
}

#[test]
fn cached_plans_follow_whoever_calls() {
    let bank = Setup::Role.bank();
    let mut client = bank.superuser();
    let prepared = client.prepare("SELECT debit_once($1, $2, 1)::text").expect("a statement");
    let call = |client: &mut Client, account: i64, key: &str| {
        let result = client.query_one(&prepared, &[&account, &key]);
        outcome(result.map(|row| row.get::<_, String>(0))).split(':').next().expect("a word").to_owned()
    };
    for round in 0..8 {
        for how in ["SET ROLE", "SET SESSION AUTHORIZATION"] {
            for (tenant, own, other) in [("a", 1, 2), ("b", 2, 1)] {
                client.batch_execute(&format!("{how} {}", bank.role(tenant))).expect("the role");
                for key in ["same", &format!("{how} {round}")] {
                    assert_eq!(call(&mut client, own, key), "done", "{how} {tenant} {round}");
                    assert_eq!(call(&mut client, other, key), "42501", "{how} {tenant} {round}");
                    assert_eq!(got(&mut client, "SELECT * FROM request_result"), "42501");
                }
                client.batch_execute("RESET ROLE; RESET SESSION AUTHORIZATION").expect("a superuser");
                for account in [own, other] {
                    assert_eq!(call(&mut client, account, &format!("superuser {round}")), "done");
                }
            }
        }
    }
    // Also inside one transaction, and after a role was left by a rollback.
    let [a, b] = ["a", "b"].map(|name| bank.role(name));
    client.batch_execute(&format!("BEGIN; SET LOCAL ROLE {a}; SAVEPOINT s; SET LOCAL ROLE {b}")).expect("roles");
    assert_eq!(call(&mut client, 2, "in b"), "done");
    client.batch_execute("ROLLBACK TO s").expect("a rollback");
    assert_eq!(call(&mut client, 2, "in b"), "42501");
    client.batch_execute("ROLLBACK TO s").expect("a rollback");
    assert_eq!(call(&mut client, 1, "in a"), "done");
    client.batch_execute("COMMIT").expect("COMMIT");
}

#[test]
fn cached_plans_follow_the_setting() {
    let bank = Setup::Setting.bank();
    let mut client = bank.session("app");
    assert_eq!(outcome(debit(&mut client, 1, "nobody", 1)), "42501");
    for round in 0..8 {
        for (tenant, own, other) in [("a", 1, 2), ("b", 2, 1)] {
            value(&mut client, &format!("SELECT set_config('app.tenant', '{tenant}', false)"));
            for key in ["same", &round.to_string()] {
                assert!(debit(&mut client, own, key, 1).is_ok());
                assert_eq!(outcome(debit(&mut client, other, key, 1)), "42501");
            }
        }
    }
    client.batch_execute("RESET app.tenant").expect("RESET");
    assert_eq!(outcome(debit(&mut client, 1, "same", 1)), "42501");
    // A transaction's setting is gone with it, and leaves nobody.
    client.batch_execute("BEGIN; SET LOCAL app.tenant = 'a'; COMMIT").expect("a transaction");
    assert_eq!(outcome(debit(&mut client, 1, "same", 1)), "42501");
    // Whoever writes SQL sets it as he likes.
    value(&mut client, "SELECT set_config('app.tenant', 'b', false)");
    assert!(debit(&mut client, 2, "taken over", 1).is_ok());
}

/// News of other sessions' changes make saved plans invalid at any moment; the plan that follows needs the same privileges.
#[test]
fn execute_is_enough_whatever_other_sessions_change_meanwhile() {
    let bank = Bank::new();
    bank.callers(&["a", "b"]);
    let ends = std::time::Instant::now() + std::time::Duration::from_secs(4);
    let callers: Vec<_> = ["a", "b"]
        .map(|name| {
            let (mut client, account) = (bank.session(name), if name == "a" { 1 } else { 2 });
            std::thread::spawn(move || {
                let mut calls = 0;
                while std::time::Instant::now() < ends {
                    // A new key each second time, in a transaction of its own.
                    let change = if calls % 4 < 2 { "debit_once" } else { "credit_once" };
                    let sql = format!("SELECT {change}({account}, 'k{}', 1)::text", calls / 2);
                    assert!(simple(&mut client, &sql).is_ok(), "{:?}", simple(&mut client, &sql));
                    calls += 1;
                }
                calls
            })
        })
        .into();
    let mut superuser = bank.superuser();
    while std::time::Instant::now() < ends {
        superuser
            .batch_execute(
                "GRANT SELECT ON account TO pg_monitor; REVOKE SELECT ON account FROM pg_monitor; ANALYZE request_result;
                 CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'; DROP FUNCTION f()",
            )
            .expect("changes");
    }
    for caller in callers {
        assert!(caller.join().expect("no refusal") > 100);
    }
}

#[test]
fn row_security_counts_from_the_next_call_of_running_sessions() {
    let bank = Setup::Role.bank();
    let mut a = bank.session("a");
    for round in 0..4 {
        let key = format!("{round}");
        bank.run("ALTER TABLE account ENABLE ROW LEVEL SECURITY");
        assert_eq!(outcome(debit(&mut a, 2, &key, 1)), "42501");
        assert!(debit(&mut a, 1, &key, 1).is_ok());
        bank.run("ALTER TABLE account DISABLE ROW LEVEL SECURITY");
        assert!(debit(&mut a, 2, &key, 1).is_ok());
        bank.run("ALTER TABLE account ENABLE ROW LEVEL SECURITY");
        assert_eq!(outcome(debit(&mut a, 2, &key, 1)), "42501", "a replay of what it did itself");
        bank.run("ALTER POLICY own ON account USING (true)");
        assert!(debit(&mut a, 2, &key, 1).is_ok());
        bank.run("ALTER POLICY own ON account USING (account_id = 1)");
    }
    // Without a policy nobody may use anything.
    bank.run("DROP POLICY own ON account");
    assert_eq!(outcome(debit(&mut a, 1, "0", 1)), "42501");
    // To switch row security off for oneself is to be refused.
    bank.run("CREATE POLICY own ON account USING (account_id = 1)");
    a.batch_execute("SET row_security = off").expect("SET");
    for account in [1, 2] {
        assert_eq!(outcome(debit(&mut a, account, "0", 1)), "42501");
    }
    // In one transaction, by whoever may.
    let mut owner = bank.superuser();
    owner
        .batch_execute(&format!(
            "ALTER TABLE account DISABLE ROW LEVEL SECURITY; BEGIN; SET LOCAL ROLE {}",
            bank.role("a")
        ))
        .unwrap();
    assert!(debit(&mut owner, 2, "inside", 1).is_ok());
    owner.batch_execute("RESET ROLE; ALTER TABLE account ENABLE ROW LEVEL SECURITY").unwrap();
    owner.batch_execute(&format!("SET LOCAL ROLE {}", bank.role("a"))).unwrap();
    assert_eq!(outcome(debit(&mut owner, 2, "inside", 1)), "42501");
    owner.batch_execute("ROLLBACK").unwrap();
}

#[test]
fn owner_superuser_and_bypassrls_are_restricted_as_the_server_restricts_them() {
    let bank = Setup::Role.bank();
    bank.callers(&["owner", "bypass"]);
    bank.run(
        "ALTER ROLE @bypass@ BYPASSRLS; ALTER TABLE account OWNER TO @owner@; GRANT SELECT ON account_tenant TO @owner@;
         GRANT USAGE ON SCHEMA public TO @owner@",
    );
    let mut sessions = [bank.superuser(), bank.session("bypass"), bank.session("owner")];
    for client in &mut sessions {
        for account in [1, 2] {
            assert!(debit(client, account, "unrestricted", 1).is_ok());
        }
        assert_eq!(outcome(debit(client, 404, "unrestricted", 1)), "23503");
    }
    bank.run("ALTER TABLE account FORCE ROW LEVEL SECURITY");
    let [superuser, bypass, owner] = &mut sessions;
    for client in [superuser, bypass] {
        assert!(debit(client, 1, "forced", 1).is_ok());
        assert_eq!(outcome(debit(client, 404, "forced", 1)), "23503");
    }
    for account in [1, 2, 404] {
        for key in ["unrestricted", "forced", "new"] {
            assert_eq!(outcome(debit(owner, account, key, 1)), "42501", "{account} {key}");
        }
    }
    bank.run("UPDATE account_tenant SET tenant = '@owner@' WHERE account_id = 2");
    assert!(debit(owner, 2, "unrestricted", 1).is_ok());
    assert!(debit(owner, 2, "new", 1).is_ok());
    assert_eq!(outcome(debit(owner, 1, "new", 1)), "42501");
}

#[test]
fn an_account_that_may_be_seen_but_not_used_answers_old_keys_and_refuses_new_ones() {
    let bank = Setup::Role.bank();
    prepare(&bank, &mut Tenant::new(Setup::Role, &bank, "b"));
    bank.run("CREATE POLICY seen ON account FOR SELECT USING (true)");
    let mut superuser = bank.superuser();
    let before = everything(&mut superuser);
    let mut a = Tenant::new(Setup::Role, &bank, "a");
    for call in calls(2, 1, "unknown").iter().filter(|call| !call.contains("find_request")) {
        assert_eq!(a.call(call), "42501", "{call}");
    }
    // Who may see an account may see its answers.
    assert_eq!(a.call("SELECT debit_once(2, 'known', 10)::text"), r#"done: {"balance": 990}"#);
    assert_eq!(outcome(a.send("READ ONLY", "SELECT debit_once(2, 'known', 10)::text")), r#"done: {"balance": 990}"#);
    assert_eq!(a.call("SELECT count(*) FROM find_request(2, 'debit:v1', 'known')"), "done: 1");
    assert_eq!(a.call("SELECT count(*) FROM find_request(2, 'debit:v1', 'unknown')"), "done: 0");
    assert_eq!(a.call("SELECT debit_once(2, 'poor', 100000)"), "42501");
    assert_eq!(a.call("SELECT debit_once(404, 'known', 10)"), "42501");
    assert_eq!(everything(&mut superuser), before);
    assert!(a.call("SELECT debit_once(1, 'known', 10)::text").starts_with("done"));
    // What a policy checks of the new row is checked.
    bank.run(
        "DROP POLICY own ON account; CREATE POLICY lower ON account FOR UPDATE USING (true) WITH CHECK (balance > 500)",
    );
    assert_eq!(a.call("SELECT debit_once(2, 'much', 900)"), "42501");
    assert!(a.call("SELECT debit_once(2, 'little', 1)::text").starts_with("done"));
}

// ---- attacks -------------------------------------------------------------------------------------------------------

/// A schema of hostile functions, operators and tables; whoever runs one leaves a trace that no rollback removes.
const HOSTILE: &str = r#"
CREATE SCHEMA hostile;
CREATE SEQUENCE hostile.used;
GRANT USAGE ON SCHEMA hostile TO PUBLIC;
GRANT ALL ON SEQUENCE hostile.used TO PUBLIC;
CREATE PROCEDURE hostile.make(name text, arguments text, result text) LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE pg_catalog.format('CREATE FUNCTION hostile.%s(%s) RETURNS %s LANGUAGE plpgsql AS '
        '$f$BEGIN PERFORM pg_catalog.nextval(''hostile.used''); RETURN %s; END$f$',
        name, arguments, result, CASE WHEN result LIKE 'SETOF %' THEN '' ELSE 'NULL' END);
END $$;
DO $$
DECLARE
    sign text;
    type text;
BEGIN
    FOREACH sign IN ARRAY ARRAY['=', '<>', '<', '<=', '>', '>=', '+', '||', '->', '?'] LOOP
        FOREACH type IN ARRAY ARRAY['bigint', 'integer', 'text', 'jsonb', 'timestamptz', 'oid', 'boolean', 'uuid', 'bytea', 'name'] LOOP
            CALL hostile.make('op_' || md5(sign || type), type || ', ' || type, CASE WHEN sign IN ('+', '||', '->') THEN type ELSE 'boolean' END);
            EXECUTE format('CREATE OPERATOR hostile.%s (FUNCTION = hostile.%s, LEFTARG = %s, RIGHTARG = %s)', sign, 'op_' || md5(sign || type), type, type);
        END LOOP;
    END LOOP;
    CALL hostile.make('clock_timestamp', '', 'timestamptz');
    CALL hostile.make('jsonb_build_object', 'text, bigint', 'jsonb');
    CALL hostile.make('jsonb_object_keys', 'jsonb', 'SETOF text');
    CALL hostile.make('jsonb_typeof', 'jsonb', 'text');
    CALL hostile.make('quote_ident', 'text', 'text');
    CALL hostile.make('has_function_privilege', 'oid, text', 'boolean');
    CALL hostile.make('has_schema_privilege', 'oid, text', 'boolean');
    CALL hostile.make('cardinality', 'anyarray', 'integer');
    CALL hostile.make('unnest', 'anyarray', 'SETOF anyelement');
    CALL hostile.make('request_fingerprint', 'jsonb', 'bytea');
    CALL hostile.make('debit_once', 'bigint, text, bigint', 'jsonb');
END $$;
CREATE TABLE hostile.account (account_id bigint PRIMARY KEY, balance bigint);
INSERT INTO hostile.account VALUES (1, 5), (2, 5), (404, 5);
CREATE TABLE hostile.request_result (LIKE request_result);
CREATE TABLE hostile.processed_message (LIKE processed_message);
CREATE TABLE hostile.operation_policy (LIKE operation_policy);
CREATE TABLE hostile.retention_fence (LIKE retention_fence);
CREATE TABLE hostile.account_tenant (account_id bigint, tenant text);
INSERT INTO hostile.account_tenant SELECT n, t FROM generate_series(1, 404) AS n, unnest(ARRAY['a', 'b', current_user]) AS t;
GRANT ALL ON ALL TABLES IN SCHEMA hostile TO PUBLIC;
"#;

#[test]
fn neither_search_path_nor_temporary_objects_change_what_a_call_does() {
    for setup in Setup::ALL {
        let bank = setup.bank();
        bank.run(HOSTILE);
        prepare(&bank, &mut Tenant::new(setup, &bank, "b"));
        let mut superuser = bank.superuser();
        let before = everything(&mut superuser);
        let mut a = Tenant::new(setup, &bank, "a");
        // The temporary objects are those of the session's user, whatever role it takes afterwards.
        bank.run(&format!("GRANT TEMPORARY ON DATABASE {} TO PUBLIC", bank.database));
        a.client
            .batch_execute(
                "CREATE TEMPORARY TABLE account AS SELECT * FROM hostile.account;
                 CREATE TEMPORARY TABLE request_result AS SELECT * FROM hostile.request_result;
                 CREATE TEMPORARY TABLE processed_message AS SELECT * FROM hostile.processed_message;
                 CREATE TEMPORARY TABLE account_tenant AS SELECT * FROM hostile.account_tenant;
                 CREATE TEMPORARY TABLE pg_extension AS SELECT * FROM pg_catalog.pg_extension;
                 CREATE FUNCTION pg_temp.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT NULL::timestamptz';
                 CREATE FUNCTION pg_temp.jsonb_build_object(text, bigint) RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb';
                 CREATE DOMAIN pg_temp.jsonb AS text;
                 CREATE FUNCTION pg_temp.equal(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true';
                 CREATE OPERATOR pg_temp.= (FUNCTION = pg_temp.equal, LEFTARG = bigint, RIGHTARG = bigint);
                 GRANT ALL ON ALL TABLES IN SCHEMA pg_temp TO PUBLIC",
            )
            .expect("temporary objects");
        for path in ["hostile, pg_catalog, public", "pg_temp, hostile, pg_catalog, public"] {
            // What the tests' own SQL uses has to be qualified then.
            let qualified = |call: String| {
                [
                    "debit_once",
                    "credit_once",
                    "run_once",
                    "cancel_request",
                    "find_request",
                    "accept_message",
                    "apply_message_once",
                ]
                .iter()
                .fold(call, |call, name| {
                    call.replace(&format!("SELECT {name}"), &format!("SELECT public.{name}"))
                        .replace(&format!("FROM {name}"), &format!("FROM public.{name}"))
                })
                .replace("md5", "pg_catalog.md5")
                .replace("'echo(", "'public.echo(")
                .replace("'echo(bigint, jsonb)'", "'public.echo(bigint, pg_catalog.jsonb)'")
                .replace("(bigint, jsonb)'", "(bigint, pg_catalog.jsonb)'")
                .replace("::text", "::pg_catalog.text")
            };
            a.client.batch_execute(&format!("SET search_path = {path}")).expect("SET");
            for call in calls(2, 1, "known").into_iter().chain(calls(404, 1, "unknown")) {
                assert_eq!(a.call(&qualified(call.clone())), "42501", "{setup:?} {path}: {call}");
            }
            let call = qualified("SELECT debit_once(1, 'hostile', 10)::text".into());
            assert_eq!(a.call(&call), r#"done: {"balance": 990}"#, "{setup:?} {path}");
        }
        bank.run("SELECT 1");
        assert_eq!(value(&mut superuser, "SELECT is_called FROM hostile.used"), "f", "{setup:?}");
        let expected = before.replacen("(1,1000)", "(1,990)", 1);
        let after = everything(&mut superuser);
        assert!(after.starts_with(expected.split("\n--\n").next().expect("accounts")), "{setup:?}: {after}");
        assert_eq!(value(&mut superuser, "SELECT count(*) FROM hostile.request_result"), "0");
    }
}

#[test]
fn a_handler_has_its_callers_rights_and_cannot_get_others() {
    let bank = Setup::Role.bank();
    bank.run(HOSTILE);
    bank.run(
        "CREATE SCHEMA own; GRANT ALL ON SCHEMA own TO @a@; GRANT USAGE ON SCHEMA own TO PUBLIC; CREATE ROLE @friend@; GRANT @friend@ TO @a@;
         CREATE TABLE own.seen (current name, session name); GRANT ALL ON own.seen TO PUBLIC",
    );
    prepare(&bank, &mut Tenant::new(Setup::Role, &bank, "b"));
    let mut superuser = bank.superuser();
    let before = everything(&mut superuser);
    let mut a = bank.session("a");
    let run = |client: &mut Client, key: &str, body: &str| {
        let body = bank.named(body);
        client
            .batch_execute(&format!(
                "CREATE OR REPLACE FUNCTION own.handler(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $h$
                 DECLARE r record; c refcursor; BEGIN {body}; RETURN '{{\"ok\": true}}'; END $h$"
            ))
            .unwrap_or_else(|error| panic!("{body}: {error:?}"));
        got(
            client,
            &format!("SELECT public.run_once(1, 'own:v1', '{key}', '{{}}', 'own.handler(bigint, jsonb)')::text"),
        )
    };
    // Refused, and nothing is left: rights of others, and what the functions themselves use.
    for (body, code) in [
        ("SET LOCAL ROLE @b@", "42501"),
        ("SET SESSION AUTHORIZATION @b@", "42501"),
        ("EXECUTE 'SET SESSION AUTHORIZATION postgres'", "42501"),
        ("RESET ROLE; RESET SESSION AUTHORIZATION; PERFORM FROM account", "42501"),
        ("PERFORM FROM account", "42501"),
        ("PERFORM FROM request_result", "42501"),
        ("UPDATE account SET balance = 1000000", "42501"),
        ("INSERT INTO request_result VALUES (1, 'own:v1', 'forged', '{}', '{}')", "42501"),
        ("DELETE FROM retention_fence", "42501"),
        ("EXECUTE 'PREPARE p AS TABLE account'; EXECUTE 'EXECUTE p'", "42501"),
        ("OPEN c FOR SELECT * FROM request_result; FETCH c INTO r", "42501"),
        ("EXECUTE 'DECLARE k CURSOR WITH HOLD FOR TABLE request_result'", "42501"),
        ("EXECUTE 'COPY request_result TO STDOUT'", "0A000"),
        ("EXECUTE 'CREATE VIEW own.v AS TABLE request_result'; PERFORM FROM own.v", "42501"),
        ("EXECUTE 'CREATE TRIGGER t BEFORE UPDATE ON account EXECUTE FUNCTION keep_record()'", "42501"),
        ("EXECUTE 'ALTER TABLE account DISABLE ROW LEVEL SECURITY'", "42501"),
        ("EXECUTE 'CREATE POLICY p ON account USING (true)'", "42501"),
        ("EXECUTE 'LOCK TABLE account'", "42501"),
        ("PERFORM debit_once(2, 'known', 10)", "42501"),
        ("PERFORM debit_once(2, 'new', 10)", "42501"),
        ("PERFORM find_request(2, 'debit:v1', 'known')", "42501"),
        ("PERFORM cancel_request(404, 'debit:v1', 'known')", "42501"),
        ("PERFORM run_once(2, 'pay:v1', 'known', '{\"n\": 1}', 'echo(bigint, jsonb)')", "42501"),
        ("PERFORM accept_messages('s', ARRAY[md5('x')::uuid, md5('y')::uuid], '{1, 2}')", "42501"),
        ("PERFORM run_once(1, 'own:v1', 'own', '{}', 'own.handler(bigint, jsonb)')", "22023"),
        // The rights of a statement end with it, also where that fails and the error is caught.
        ("BEGIN PERFORM debit_once(2, 'new', 10); EXCEPTION WHEN OTHERS THEN END; PERFORM FROM account", "42501"),
        (
            "BEGIN PERFORM debit_once(1, 'poor', 100000); EXCEPTION WHEN OTHERS THEN END; PERFORM FROM request_result",
            "42501",
        ),
        ("PERFORM debit_once(1, 'inner', 10); UPDATE account SET balance = 0", "42501"),
    ] {
        assert_eq!(run(&mut a, "own", body), code, "{body}");
        assert_eq!(everything(&mut superuser), before, "{body}");
        assert_eq!(value(&mut a, "SELECT current_user || ' ' || session_user"), bank.named("@a@ @a@"), "{body}");
    }
    // Allowed, and of no effect on what the call itself does.
    for (i, body) in [
        "INSERT INTO own.seen VALUES (current_user, session_user)",
        "PERFORM set_config('search_path', 'hostile, pg_catalog', true)",
        "PERFORM set_config('search_path', 'hostile, pg_catalog', false)",
        "EXECUTE 'CREATE TEMPORARY TABLE request_result (account_id int)'; EXECUTE 'CREATE TEMPORARY TABLE account (account_id int)'",
        "EXECUTE 'CREATE TABLE own.account (account_id int)'; EXECUTE 'DROP TABLE own.account'",
        "EXECUTE 'DISCARD PLANS'",
        "EXECUTE 'DEALLOCATE ALL'",
        "OPEN c FOR SELECT debit_once(1, 'in a cursor', 1) FROM generate_series(1, 3); FETCH c INTO r",
        "OPEN c FOR SELECT debit_once(1, 'held', 0)",
        "EXECUTE 'DECLARE held CURSOR WITH HOLD FOR SELECT generate_series(1, 3)'",
        "PERFORM set_config('role', '@friend@', true); INSERT INTO own.seen VALUES (current_user, session_user)",
        "EXECUTE 'DROP FUNCTION own.handler(bigint, jsonb)'",
        "PERFORM set_config('row_security', 'off', true); PERFORM set_config('session_replication_role', 'replica', true)",
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("allowed {i}");
        let answer = run(&mut a, &key, body);
        if body.contains("row_security") {
            assert_eq!(answer, "42501", "{body}");
            continue;
        }
        assert_eq!(answer, r#"done: {"ok": true}"#, "{body}");
        a.batch_execute("RESET ROLE; RESET search_path; SET search_path = public").expect("RESET");
        let recorded = format!("SELECT count(*) FROM request_result WHERE account_id = 1 AND operation = 'own:v1' AND request_key = '{key}'");
        assert_eq!(value(&mut superuser, &recorded), "1", "{body}");
    }
    let seen = value(&mut superuser, "SELECT string_agg(current || ' ' || session, ', ') FROM own.seen");
    assert_eq!(seen, bank.named("@a@ @a@, @friend@ @a@"));
    assert_eq!(value(&mut superuser, "SELECT is_called FROM hostile.used"), "f");
    assert_eq!(value(&mut superuser, "SELECT count(*) FROM hostile.request_result"), "0");
    assert_eq!(balance(&mut superuser, 1), 999);
    assert_eq!(balance(&mut superuser, 2), 1006);
}

#[test]
fn a_trigger_of_somebody_elses_runs_as_the_caller() {
    let bank = Bank::new();
    bank.callers(&["a", "mallory"]);
    bank.run(
        "CREATE SCHEMA m AUTHORIZATION @mallory@; GRANT TRIGGER ON account TO @mallory@;
         REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM @mallory@",
    );
    let mut superuser = bank.superuser();
    superuser.batch_execute("SELECT debit_once(2, 'secret', 7)").expect("a record");
    let mut mallory = bank.session("mallory");
    mallory
        .batch_execute(&bank.named(
            "CREATE TABLE m.seen (what text, code text); GRANT USAGE ON SCHEMA m TO PUBLIC; GRANT ALL ON m.seen TO PUBLIC;
             CREATE FUNCTION m.attempt(what text) RETURNS void LANGUAGE plpgsql AS $$
             BEGIN
                 EXECUTE what;
                 INSERT INTO m.seen VALUES (what, 'done');
             EXCEPTION WHEN OTHERS THEN
                 INSERT INTO m.seen VALUES (what, SQLSTATE);
             END $$;
             CREATE FUNCTION m.look() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 INSERT INTO m.seen VALUES ('is ' || current_user || ' ' || session_user, NULL);
                 PERFORM m.attempt('TABLE request_result');
                 PERFORM m.attempt('TABLE account');
                 PERFORM m.attempt('UPDATE account SET balance = 0');
                 PERFORM m.attempt('SET LOCAL ROLE @mallory@');
                 PERFORM m.attempt('GRANT SELECT ON account TO @mallory@');
                 PERFORM m.attempt('ALTER ROLE @mallory@ SUPERUSER');
                 RETURN NEW;
             END $$;
             CREATE FUNCTION m.look_definer() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
             BEGIN
                 INSERT INTO m.seen VALUES ('is ' || current_user || ' ' || session_user, NULL);
                 PERFORM m.attempt('TABLE request_result');
                 RETURN NEW;
             END $$;
             CREATE TRIGGER a BEFORE UPDATE ON account FOR EACH ROW EXECUTE FUNCTION m.look();
             CREATE TRIGGER b AFTER UPDATE ON account FOR EACH ROW EXECUTE FUNCTION m.look_definer()",
        ))
        .expect("triggers");
    let mut a = bank.session("a");
    assert_eq!(outcome(debit(&mut a, 1, "k", 10)), r#"done: {"balance": 990}"#);
    let expected = "is @a@ @a@:NULL, TABLE request_result:42501, TABLE account:42501, UPDATE account SET balance = 0:42501,
        SET LOCAL ROLE @mallory@:42501, GRANT SELECT ON account TO @mallory@:42501, ALTER ROLE @mallory@ SUPERUSER:42501,
        is @mallory@ @a@:NULL, TABLE request_result:42501";
    let expected = bank.named(expected).split(",\n        ").collect::<Vec<_>>().join(", ");
    let seen = value(&mut superuser, "SELECT string_agg(what || ':' || coalesce(code, 'NULL'), ', ') FROM m.seen");
    assert_eq!(seen, expected);
    assert_eq!(outcome(debit(&mut a, 1, "k", 10)), r#"done: {"balance": 990}"#);
    for sql in ["TABLE account", "TABLE request_result", "SELECT debit_once(2, 'secret', 7)"] {
        assert_eq!(got(&mut mallory, sql), "42501", "{sql}");
    }
}

#[test]
fn whoever_may_execute_the_trigger_function_harms_neither_records_nor_server() {
    let bank = Bank::new();
    bank.callers(&["a"]);
    bank.run("GRANT EXECUTE ON FUNCTION keep_record() TO @a@; CREATE SCHEMA own; GRANT ALL ON SCHEMA own TO @a@");
    let mut a = bank.session("a");
    a.batch_execute(
        "CREATE TABLE own.t (created_at timestamptz DEFAULT 'epoch', operation text DEFAULT 'debit:v1'); INSERT INTO own.t DEFAULT VALUES;
         CREATE TABLE own.u (n int); INSERT INTO own.u VALUES (1)",
    )
    .expect("tables");
    for (event, level) in
        [("DELETE", "ROW"), ("DELETE", "STATEMENT"), ("UPDATE OR INSERT", "ROW"), ("UPDATE OR INSERT", "STATEMENT")]
    {
        for table in ["own.t", "own.u"] {
            for when in ["BEFORE", "AFTER"] {
                a.batch_execute(&format!(
                    "CREATE TRIGGER t {when} {event} ON {table} FOR EACH {level} EXECUTE FUNCTION keep_record()"
                ))
                .expect("a trigger");
                let expected = if event == "DELETE" { "42804" } else { "23001" };
                let statement = if event == "DELETE" {
                    format!("DELETE FROM {table}")
                } else {
                    format!("INSERT INTO {table} DEFAULT VALUES")
                };
                assert_eq!(done(&mut a, &statement), expected, "{when} {event} {level} {table}");
                a.batch_execute(&format!("DROP TRIGGER t ON {table}")).expect("DROP TRIGGER");
            }
        }
    }
    assert_eq!(value(&mut bank.superuser(), "SELECT count(*) FROM retention_fence"), "0");
}

/// A name that is hard on whoever puts it into SQL or a format string.
const ODD: &str = r#"odd "%s" %n %1$s \'; -- ä"#;

#[test]
fn quotes_and_format_characters_mean_nothing_special_anywhere() {
    let database = CLUSTER.empty_database("");
    let mut client = CLUSTER.connect_to(&database);
    let schema = format!("\"{}\"", ODD.replace('"', "\"\""));
    client
        .batch_execute(&format!(
            "CREATE SCHEMA {schema}; CREATE EXTENSION idempotency_record SCHEMA {schema}; SET search_path = {schema};
             INSERT INTO account VALUES (1, 1000), (2, 1000);
             CREATE FUNCTION {schema}(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2';
             CREATE FUNCTION wrong(bigint) RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb';
             CREATE ROLE {database}_p LOGIN; GRANT USAGE ON SCHEMA {schema} TO {database}_p;
             GRANT EXECUTE ON FUNCTION debit_once(bigint, text, bigint), run_once(bigint, text, text, jsonb, regprocedure) TO {database}_p;
             REVOKE EXECUTE ON FUNCTION {schema}(bigint, jsonb) FROM PUBLIC"
        ))
        .expect("the schema");
    let text = |text: &str| format!("'{}'", text.replace('\'', "''"));
    for odd in [ODD, "%s%s%s%n", "%", "'", "\"", "\\", "$1", "{}", "%99999999d", "\u{1}\u{7f}", "a\nb", "💶"] {
        let key = text(odd);
        assert_eq!(got(&mut client, &format!("SELECT debit_once(1, {key}, 0)")), "22023");
        let first = got(&mut client, &format!("SELECT debit_once(1, {key}, 1)::text"));
        assert!(first.starts_with("done: "), "{odd}: {first}");
        assert_eq!(got(&mut client, &format!("SELECT debit_once(1, {key}, 1)::text")), first);
        assert_eq!(got(&mut client, &format!("SELECT debit_once(1, {key}, 2)")), "22023");
        assert_eq!(value(&mut client, &format!("SELECT request_key FROM find_request(1, 'debit:v1', {key})")), odd);
        assert_eq!(got(&mut client, &format!("SELECT cancel_request(2, 'debit:v1', {key})::text")), "done: NULL");
        assert_eq!(got(&mut client, &format!("SELECT run_once(1, {key}, 'k', '{{}}', 'wrong(bigint)')")), "22023");
        let message = format!("SELECT accept_message({key}, md5('m')::uuid, 1, to_jsonb({key}::text))");
        assert_eq!(got(&mut client, &message), "done: t");
        assert_eq!(got(&mut client, &message), "done: f");
        assert_eq!(got(&mut client, &format!("SELECT accept_message({key}, md5('m')::uuid, 2)")), "22023");
        assert_eq!(got(&mut client, &format!("SELECT accept_version({key}, {key}, 1)")), "done: t");
        assert_eq!(got(&mut client, &format!("SELECT accept_version({key}, {key}, 1)")), "done: f");
        // A field's name is in the DETAIL, as it is.
        let pay = |value: i32| {
            format!(
                "SELECT run_once(1, 'pay:v1', {key}, jsonb_build_object({key}::text, {value}), {}::regprocedure)",
                text(&format!("{schema}(bigint, jsonb)"))
            )
        };
        assert!(got(&mut client, &pay(1)).starts_with("done: "));
        let refusal = report(simple(&mut client, &pay(2)));
        assert_eq!(refusal.code().code(), "22023");
        assert!(refusal.detail().is_some_and(|detail| detail.contains(odd)), "{refusal:?}");
    }
    // The handler's name is in the errors, quoted.
    let wrong = report(simple(&mut client, "SELECT run_once(1, 'pay:v1', 'k', '{}', 'wrong(bigint)')"));
    assert_eq!(wrong.code().code(), "42883");
    assert!(wrong.detail().is_some_and(|detail| detail.contains(&schema)), "{wrong:?}");
    client.batch_execute(&format!("SET ROLE {database}_p")).expect("a role");
    let handler = text(&format!("{schema}(bigint, jsonb)"));
    let denied = report(simple(&mut client, &format!("SELECT run_once(1, 'pay:v1', 'k', '{{}}', {handler})")));
    assert_eq!(denied.code().code(), "42501");
    assert!(denied.message().contains(&schema), "{denied:?}");
    client.batch_execute("RESET ROLE").expect("RESET");
    // A purge tells names of subscribers by NOTICE, and by DETAIL.
    client
        .batch_execute(
            "INSERT INTO subscriber_policy SELECT DISTINCT subscriber, interval '1 microsecond' FROM processed_message",
        )
        .expect("policies");
    client.batch_execute("CALL purge()").expect("purge");
    assert_eq!(value(&mut client, "SELECT count(*) FROM processed_message"), "0");
    client.batch_execute("SET idempotency_record.minimum_retention = '1h'").expect("SET");
    let refusal = report(client.batch_execute("CALL purge()"));
    assert_eq!(refusal.code().code(), "22023");
    assert!(refusal.detail().is_some_and(|detail| detail.contains("subscriber")), "{refusal:?}");
}

/// A bank in a schema of mallory's, who also has TRIGGER on the account by mistake, and no other privilege than to call.
fn schema_of_mallory() -> Bank {
    let bank = Bank { database: CLUSTER.empty_database("") };
    bank.run(&format!(
        "CREATE ROLE @mallory@ LOGIN; CREATE ROLE @victim@ LOGIN; GRANT CREATE ON DATABASE {} TO @mallory@;
         CREATE SCHEMA s AUTHORIZATION @mallory@; CREATE EXTENSION idempotency_record SCHEMA s;
         INSERT INTO s.account VALUES (1, 1000), (2, 1000); GRANT USAGE ON SCHEMA s TO @victim@;
         GRANT EXECUTE ON FUNCTION s.debit_once(bigint, text, bigint) TO @mallory@, @victim@; GRANT TRIGGER ON s.account TO @mallory@;
         GRANT EXECUTE ON FUNCTION s.purge_expired_keys(interval) TO @victim@;
         CREATE TABLE loot (who name, what text); GRANT ALL ON loot TO PUBLIC; SELECT s.debit_once(2, 'secret', 7)",
        bank.database
    ));
    bank
}

/// Another schema in the place of the extension's, with a view for each table that hands what it can read to a function.
const SUBSTITUTE: &str = "
    ALTER SCHEMA s RENAME TO s2;
    CREATE SCHEMA s; GRANT USAGE ON SCHEMA s TO PUBLIC;
    CREATE FUNCTION s.leak(t text) RETURNS boolean LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.loot VALUES (current_user, t);
        RETURN true;
    END $$;
    CREATE VIEW s.account AS SELECT account_id, balance FROM s2.account
     WHERE s.leak((SELECT string_agg(r::text, ' ') FROM s2.request_result AS r));
    CREATE VIEW s.request_result AS SELECT * FROM s2.request_result AS r WHERE s.leak(r::text);
    CREATE VIEW s.processed_message AS SELECT * FROM s2.processed_message AS r WHERE s.leak('message');
    CREATE VIEW s.purge_lock AS SELECT * FROM s2.purge_lock WHERE s.leak('lock');
    CREATE VIEW s.operation_policy AS SELECT * FROM s2.operation_policy WHERE s.leak('policy');
    CREATE VIEW s.retention_fence AS SELECT * FROM s2.retention_fence WHERE s.leak('fence');
    CREATE VIEW s.purge_progress AS SELECT * FROM s2.purge_progress WHERE s.leak('progress');
    GRANT ALL ON ALL TABLES IN SCHEMA s TO PUBLIC;";

#[test]
fn the_owner_of_the_schema_cannot_put_views_in_the_place_of_the_tables() {
    let bank = schema_of_mallory();
    let mut victim = bank.session("victim");
    let mut mallory = bank.session("mallory");
    for client in [&mut victim, &mut mallory] {
        assert!(got(client, "SELECT s.debit_once(1, 'before', 1)::text").starts_with("done: "));
    }
    mallory.batch_execute(SUBSTITUTE).expect("a substitute");
    // Running sessions and new ones use the tables, where they are now.
    let purge = bank.named("GRANT USAGE ON SCHEMA s2 TO @victim@");
    mallory.batch_execute(&purge).expect("GRANT");
    for client in [&mut victim, &mut mallory, &mut bank.session("victim"), &mut bank.superuser()] {
        assert_eq!(got(client, "SELECT s2.debit_once(1, 'before', 1)::text"), r#"done: {"balance": 999}"#);
        assert!(got(client, "SELECT s2.debit_once(1, gen_random_uuid()::text, 1)::text").starts_with("done: "));
    }
    assert_eq!(got(&mut victim, "SELECT s2.purge_expired_keys('1 day')"), "done: 0");
    bank.run("CALL s2.purge()");
    let mut superuser = bank.superuser();
    assert_eq!(value(&mut superuser, "SELECT count(*) FROM loot"), "0");
    assert_eq!(value(&mut superuser, "SELECT balance FROM s2.account WHERE account_id = 1"), "995");
}

#[test]
fn nor_while_a_call_waits_for_a_lock() {
    for caller in ["victim", "mallory"] {
        let bank = schema_of_mallory();
        let mut client = bank.session(caller);
        assert!(got(&mut client, "SELECT s.debit_once(1, 'before', 1)::text").starts_with("done: "));
        let mut mallory = bank.session("mallory");
        // The lock of CREATE TRIGGER lets a call begin, and holds it up at the UPDATE of the account.
        mallory
            .batch_execute(
                "CREATE FUNCTION s.nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; GRANT USAGE ON SCHEMA s TO PUBLIC;
                 BEGIN; CREATE TRIGGER t BEFORE UPDATE ON s.account FOR EACH ROW EXECUTE FUNCTION s.nothing()",
            )
            .expect("a trigger");
        let backend = client_tests::pid(&mut client);
        let call = client_tests::in_background(client, "SELECT s.debit_once(1, 'held up', 1)::text".into());
        let mut superuser = bank.superuser();
        wait_until_blocked(&mut superuser, backend);
        mallory.batch_execute(SUBSTITUTE).expect("a substitute");
        mallory.batch_execute("COMMIT").expect("COMMIT");
        let (_, result) = call.join().expect("a call");
        assert_eq!(outcome(result), r#"done: {"balance": 998}"#, "{caller}");
        assert_eq!(value(&mut superuser, "SELECT count(*) FROM loot"), "0", "{caller}");
        assert_eq!(value(&mut superuser, "SELECT balance FROM s2.account WHERE account_id = 1"), "998");
    }
}

#[test]
fn nor_for_the_worker_which_runs_triggers_as_the_tables_owner() {
    let cluster = Cluster::start(&[
        "shared_preload_libraries=idempotency_record",
        "idempotency_record.databases=bank",
        "idempotency_record.purge_interval=1",
    ]);
    let mut client = cluster.connect();
    client.batch_execute("CREATE DATABASE bank").expect("a database");
    let mut client = cluster.connect_to("bank");
    client
        .batch_execute(
            "CREATE ROLE mallory LOGIN; GRANT CREATE ON DATABASE bank TO mallory; CREATE SCHEMA s AUTHORIZATION mallory;
             CREATE EXTENSION idempotency_record SCHEMA s; INSERT INTO s.account VALUES (1, 1000);
             CREATE TABLE loot (who name, what text); GRANT ALL ON loot TO PUBLIC;
             SET ROLE mallory",
        )
        .expect("a schema");
    client.batch_execute(SUBSTITUTE).expect("a substitute");
    client.batch_execute("RESET ROLE").expect("RESET");
    let expired = |key: &str| {
        format!(
            "INSERT INTO s2.request_result (account_id, operation, request_key, request, response, created_at)
                 VALUES (1, 'debit:v1', '{key}', '{{}}', '{{}}', now() - interval '3 days')"
        )
    };
    client.batch_execute(&expired("one")).expect("a record");
    wait_until(&mut client, "SELECT count(*) = 0 FROM s2.request_result");
    assert_eq!(value(&mut client, "SELECT count(*) FROM loot"), "0");
    // What docs/security.md says of TRIGGER: the worker deletes as the tables' owner, so that a trigger has its rights. Not a
    // superuser's, where the owner is none.
    client
        .batch_execute(
            "CREATE ROLE owner; ALTER TABLE s2.request_result OWNER TO owner; ALTER TABLE s2.retention_fence OWNER TO owner;
             ALTER TABLE s2.purge_lock OWNER TO owner; ALTER TABLE s2.purge_progress OWNER TO owner;
             ALTER TABLE s2.processed_message OWNER TO owner; ALTER TABLE s2.operation_policy OWNER TO owner;
             ALTER TABLE s2.subscriber_policy OWNER TO owner; GRANT USAGE ON SCHEMA s2 TO owner;
             CREATE FUNCTION s2.look() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 INSERT INTO public.loot VALUES (current_user, current_setting('is_superuser'));
                 RETURN OLD;
             END $$;
             CREATE TRIGGER look BEFORE DELETE ON s2.request_result FOR EACH ROW EXECUTE FUNCTION s2.look()",
        )
        .expect("a trigger");
    client.batch_execute(&expired("two")).expect("a record");
    wait_until(&mut client, "SELECT count(*) = 0 FROM s2.request_result");
    assert_eq!(value(&mut client, "SELECT string_agg(who, ' ') FROM loot"), "owner");
}

// ---- records -------------------------------------------------------------------------------------------------------

/// A bank whose role `owner` owns the tables, and whose role `granted` has every privilege on them.
fn recorded() -> Bank {
    let bank = Bank::new();
    bank.callers(&["owner", "granted"]);
    bank.run(
        "SELECT debit_once(1, 'k', 10), accept_message('s', md5('m')::uuid, 1);
         GRANT ALL ON ALL TABLES IN SCHEMA public TO @granted@;
         ALTER TABLE account OWNER TO @owner@; ALTER TABLE request_result OWNER TO @owner@;
         ALTER TABLE processed_message OWNER TO @owner@",
    );
    bank
}

#[test]
fn nobody_changes_a_record_or_deletes_it_before_its_time() {
    let bank = recorded();
    let mut superuser = bank.superuser();
    let before = everything(&mut superuser);
    let record = "INSERT INTO request_result (account_id, operation, request_key, request, response) VALUES (1, 'debit:v1', 'k', '{}', '{}')";
    let message = "INSERT INTO processed_message (subscriber, message_id, account_id) VALUES ('s', md5('m')::uuid, 2)";
    let mut attempts = vec![
        "UPDATE request_result SET response = '{}'".to_owned(),
        "UPDATE request_result SET response = response".into(),
        "UPDATE request_result SET created_at = 'epoch'".into(),
        "UPDATE request_result SET request_key = 'other'".into(),
        "UPDATE request_result SET cancelled = true".into(),
        "UPDATE processed_message SET account_id = 2".into(),
        "DELETE FROM request_result".into(),
        "DELETE FROM processed_message".into(),
        "WITH gone AS (DELETE FROM request_result RETURNING *) SELECT count(*) FROM gone".into(),
        "TRUNCATE request_result".into(),
        "TRUNCATE processed_message".into(),
        "TRUNCATE account, request_result, processed_message".into(),
        format!("{record} ON CONFLICT (account_id, operation, request_key) DO UPDATE SET response = excluded.response"),
        format!("{message} ON CONFLICT (subscriber, message_id) DO UPDATE SET account_id = 2"),
        "DO $$BEGIN UPDATE request_result SET response = '{}'; END$$".into(),
    ];
    if major() >= 15 {
        for action in ["UPDATE SET response = '{}'", "DELETE"] {
            attempts.push(format!("MERGE INTO request_result AS r USING account AS a ON r.account_id = a.account_id WHEN MATCHED THEN {action}"));
        }
    }
    for mut client in [bank.superuser(), bank.session("owner"), bank.session("granted")] {
        for attempt in &attempts {
            assert_eq!(done(&mut client, attempt), "23001", "{attempt}");
        }
        assert_eq!(done(&mut client, record), "23505");
        assert_eq!(done(&mut client, &format!("{record} ON CONFLICT DO NOTHING")), "done");
        assert_eq!(done(&mut client, "DELETE FROM account WHERE account_id = 1"), "23503");
        assert_eq!(done(&mut client, "UPDATE account SET account_id = 7 WHERE account_id = 1"), "23503");
        assert_eq!(done(&mut client, "UPDATE request_result SET response = '{}' WHERE false"), "done");
        assert_eq!(everything(&mut superuser), before);
    }
    for mut client in [bank.superuser(), bank.session("owner")] {
        assert_eq!(done(&mut client, "TRUNCATE account CASCADE"), "23001");
        assert_eq!(done(&mut client, "DELETE FROM account WHERE account_id = 404"), "done");
    }
    assert_eq!(done(&mut superuser, "DELETE FROM account WHERE account_id = 2"), "done", "no record, no reason");
    // What a superuser can do nevertheless.
    superuser
        .batch_execute("SET session_replication_role = replica; UPDATE request_result SET response = '{\"balance\": 1}'; RESET session_replication_role")
        .expect("an UPDATE");
    assert_eq!(outcome(debit(&mut superuser, 1, "k", 10)), r#"done: {"balance": 1}"#);
    superuser.batch_execute("ALTER TABLE request_result DISABLE TRIGGER USER; DELETE FROM request_result; ALTER TABLE request_result ENABLE TRIGGER USER").expect("a DELETE");
}

#[test]
fn an_expired_record_can_be_deleted_by_hand_and_its_dated_key_stays_refused() {
    let bank = recorded();
    bank.run("GRANT INSERT ON retention_fence TO @granted@");
    for mut client in [bank.superuser(), bank.session("granted"), bank.session("owner")] {
        bank.run("TRUNCATE retention_fence");
        client
            .batch_execute(
                "INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
                 VALUES (1, 'debit:v1', 'old', '{}', '{}', now() - interval '3 days'), (1, 'debit:v1', 'young', '{}', '{}', now() - interval '1 day')
                     ON CONFLICT DO NOTHING;
                 INSERT INTO processed_message (subscriber, message_id, account_id, created_at)
                 VALUES ('s', md5('old')::uuid, 1, now() - interval '8 days')",
            )
            .expect("records");
        assert_eq!(done(&mut client, "DELETE FROM request_result WHERE request_key IN ('old', 'young')"), "23001");
        assert_eq!(done(&mut client, "DELETE FROM request_result WHERE request_key = 'old'"), "done");
        assert_eq!(done(&mut client, "DELETE FROM processed_message WHERE message_id = md5('old')::uuid"), "done");
        let fences = "SELECT string_agg(concat_ws(' ', kind, name, now() - purged_before BETWEEN interval '47 hours' AND interval '169 hours'), ', ' ORDER BY kind)
                        FROM retention_fence";
        assert_eq!(value(&mut bank.superuser(), fences), "operation debit:v1 t, subscriber s t");
        assert_eq!(got(&mut client, "SELECT debit_once(1, 'old', 1, now() - interval '3 days')"), "22023");
    }
}

#[test]
fn the_triggers_are_no_obstacle_for_dump_restore_and_replication() {
    let bank = recorded();
    let source = &bank.database;
    let expected = contents(&mut bank.superuser());
    let dumped = |arguments: &str| format!("pg_dump {arguments} {source} -f {source}.dump");
    for (how, dump, restore) in [
        ("plain", dumped("-Fp"), "psql -Xq -v ON_ERROR_STOP=1 -f $SOURCE.dump $TARGET"),
        ("custom", dumped("-Fc"), "pg_restore --exit-on-error -d $TARGET $SOURCE.dump"),
        (
            "data only",
            dumped("-Fc"),
            "pg_restore --exit-on-error --section=pre-data -d $TARGET $SOURCE.dump && pg_restore --exit-on-error --data-only --disable-triggers -d $TARGET $SOURCE.dump",
        ),
    ] {
        let target = CLUSTER.empty_database("");
        let restore = restore.replace("$SOURCE", source).replace("$TARGET", &target);
        CLUSTER.run("sh", &["-c", &format!("{dump} && {restore} && rm {source}.dump")]);
        let mut client = CLUSTER.connect_to(&target);
        assert_eq!(contents(&mut client), expected, "{how}");
        assert_eq!(outcome(debit(&mut client, 1, "k", 10)), r#"done: {"balance": 990}"#, "{how}");
        assert_eq!(done(&mut client, "DELETE FROM request_result"), "23001", "{how}");
        assert_eq!(
            value(
                &mut client,
                "SELECT count(*) FROM pg_trigger WHERE tgfoid = 'keep_record'::regproc AND tgenabled = 'O'"
            ),
            "4",
            "{how}"
        );
    }
    // The apply worker copies, inserts and deletes.
    let target = CLUSTER.database();
    bank.run("CREATE PUBLICATION p FOR TABLE account, request_result, processed_message");
    value(&mut bank.superuser(), &format!("SELECT pg_create_logical_replication_slot('{source}', 'pgoutput')"));
    let mut subscriber = CLUSTER.connect_to(&target);
    subscriber
        .batch_execute(&format!(
            "CREATE SUBSCRIPTION {target} CONNECTION 'host={} user=postgres dbname={source}' PUBLICATION p
               WITH (create_slot = false, slot_name = '{source}')",
            CLUSTER.directory().display()
        ))
        .expect("a subscription");
    wait_until(&mut subscriber, "SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel");
    assert_eq!(contents(&mut subscriber), expected);
    bank.run("SELECT debit_once(1, 'replicated', 10)");
    wait_until(&mut subscriber, "SELECT count(*) = 2 FROM request_result");
    bank.run("SELECT purge_expired_keys('0'), purge_processed_messages('0')");
    wait_until(&mut subscriber, "SELECT count(*) = 0 FROM request_result");
    wait_until(&mut subscriber, "SELECT count(*) = 0 FROM processed_message");
    subscriber
        .batch_execute(&format!("ALTER SUBSCRIPTION {target} DISABLE; ALTER SUBSCRIPTION {target} SET (slot_name = NONE); DROP SUBSCRIPTION {target}"))
        .expect("DROP SUBSCRIPTION");
    wait_until(&mut subscriber, &format!("SELECT NOT active FROM pg_replication_slots WHERE slot_name = '{source}'"));
    value(&mut bank.superuser(), &format!("SELECT pg_drop_replication_slot('{source}')::text"));
}

/// What docs/security.md warns of, as long as it is so.
#[test]
fn a_dump_has_the_grants_and_the_tenants_but_no_row_security() {
    let bank = Setup::Role.bank();
    assert_eq!(outcome(debit(&mut bank.session("a"), 2, "k", 1)), "42501");
    let target = Bank { database: CLUSTER.empty_database("") };
    let (from, to) = (&bank.database, &target.database);
    CLUSTER.run(
        "sh",
        &[
            "-c",
            &format!("pg_dump {from} -f {from}.sql && psql -Xq -v ON_ERROR_STOP=1 -f {from}.sql {to} && rm {from}.sql"),
        ],
    );
    let mut client = target.superuser();
    assert_eq!(value(&mut client, "SELECT count(*) FROM account_tenant"), "2");
    assert_eq!(value(&mut client, "SELECT relrowsecurity FROM pg_class WHERE oid = 'account'::regclass"), "f");
    client.batch_execute(&format!("SET ROLE {}", bank.role("a"))).expect("the role");
    assert!(debit(&mut client, 2, "k", 1).is_ok());
}

#[test]
fn an_update_of_the_extension_keeps_row_security_and_a_column_of_ones_own() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the root of the repository");
    let released =
        std::fs::read_to_string(root.join("sql/released/idempotency_record--0.2.0.sql")).expect("the script of 0.2.0");
    let share = std::process::Command::new(Path::new(&client_tests::environment("PGBIN")).join("pg_config"))
        .arg("--sharedir")
        .output();
    let share = String::from_utf8(share.expect("pg_config").stdout).expect("UTF-8");
    // A name that no other test uses, and an empty step to 0.2.0.
    let directory = Path::new(share.trim()).join("extension");
    let files = [
        ("idempotency_record--0.2.0.security.sql", &released[..]),
        ("idempotency_record--0.2.0.security--0.2.0.sql", "SELECT 1;"),
    ];
    for (name, text) in files {
        std::fs::write(directory.join(name), text).expect("a script");
    }
    let bank = Bank { database: CLUSTER.empty_database("") };
    bank.run("CREATE EXTENSION idempotency_record VERSION '0.2.0.security'");
    bank.run(
        "INSERT INTO account VALUES (1, 1000), (2, 1000); CREATE ROLE @a@ LOGIN;
         GRANT EXECUTE ON FUNCTION debit_once(bigint, text, bigint) TO @a@;
         SELECT debit_once(2, 'k', 1);
         ALTER TABLE account ADD COLUMN tenant name; UPDATE account SET tenant = '@a@' WHERE account_id = 1;
         CREATE POLICY own ON account USING (tenant = current_user); ALTER TABLE account ENABLE ROW LEVEL SECURITY;
         ALTER EXTENSION idempotency_record UPDATE TO '0.2.0'; ALTER EXTENSION idempotency_record UPDATE",
    );
    for (name, _) in files {
        let _ = std::fs::remove_file(directory.join(name));
    }
    let mut a = bank.session("a");
    assert!(debit(&mut a, 1, "k", 1).is_ok());
    assert_eq!(outcome(debit(&mut a, 2, "k", 1)), "42501");
    assert_eq!(got(&mut bank.superuser(), "SELECT debit_once(2, 'k', 1)::text"), r#"done: {"balance": 999}"#);
    assert_eq!(done(&mut bank.superuser(), "DELETE FROM request_result"), "23001");
}
