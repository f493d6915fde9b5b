//! The documentation is run: every fenced block whose language is `sql`, in order, in one database for each document.
//!
//! A block runs in psql, by a superuser. If a fenced block of language `text` follows at once (blank lines aside), it is
//! what psql prints, compared line by line without trailing blanks. Where that shows an `ERROR:`, psql goes on after
//! errors; elsewhere an error is a failure. Commands for the shell and sketches use another language, or none.

use std::path::{Path, PathBuf};
use std::process::Output;

use client_tests::{Cluster, simple, value};

/// A fenced block, and the line on which it starts.
struct Block {
    line: usize,
    language: String,
    text: String,
    /// Whether only blank lines stand between this block and the one before.
    follows: bool,
}

fn blocks(markdown: &str) -> Vec<Block> {
    let mut blocks = Vec::<Block>::new();
    let mut open: Option<Block> = None;
    let mut follows = false;
    for (line, text) in (1..).zip(markdown.lines()) {
        match (&mut open, text.strip_prefix("```")) {
            (None, Some(language)) => {
                let language = language.trim().to_owned();
                open = Some(Block { line, language, text: String::new(), follows });
            }
            (Some(_), Some(_)) => {
                blocks.extend(open.take());
                follows = true;
            }
            (Some(block), None) => {
                block.text.push_str(text);
                block.text.push('\n');
            }
            (None, None) => follows &= text.trim().is_empty(),
        }
    }
    assert!(open.is_none(), "a fenced block is not closed");
    blocks
}

fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the root of the repository");
    let mut documents: Vec<_> = std::fs::read_dir(root.join("docs"))
        .map(|entries| entries.map(|entry| entry.expect("an entry of docs").path()).collect())
        .unwrap_or_default();
    documents.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    documents.sort();
    assert!(!documents.is_empty(), "docs/ holds no document");
    documents.insert(0, root.join("README.md"));
    documents
}

/// As a reader compares: neither blanks at the end of a line nor empty lines around the whole count.
fn normalized(text: &str) -> String {
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim_matches('\n').to_owned()
}

fn psql(cluster: &Cluster, database: &str, sql: &str, stop: bool) -> (String, Output) {
    // Errors belong where they occurred among the results, as on a terminal; hence one stream for both.
    let command = format!("exec psql -X -v ON_ERROR_STOP={} '{database}' 2>&1", u8::from(stop));
    let output = cluster.run_with_input("sh", &["-c", &command], sql);
    (normalized(&String::from_utf8_lossy(&output.stdout)), output)
}

/// What is wrong with a document, if anything.
fn check(cluster: &Cluster, path: &Path) -> Vec<String> {
    let name = path.file_name().expect("a name").to_string_lossy().into_owned();
    let markdown = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{name}: {error}"));
    let blocks = blocks(&markdown);
    let database = cluster.empty_database("");
    let mut faults = Vec::new();
    for (i, block) in blocks.iter().enumerate().filter(|(_, block)| block.language == "sql") {
        let shown = blocks.get(i + 1).filter(|next| next.follows && next.language == "text");
        let fails = shown.is_some_and(|shown| shown.text.lines().any(|line| line.starts_with("ERROR:")));
        let (got, output) = psql(cluster, &database, &block.text, !fails);
        if !fails && !output.status.success() {
            faults.push(format!("{name}, line {}:\n{got}", block.line));
        } else if let Some(shown) = shown
            && normalized(&shown.text) != got
        {
            faults.push(format!(
                "{name}, line {}: shown is\n{}\nbut psql prints\n{got}",
                shown.line,
                normalized(&shown.text)
            ));
        }
    }
    // Roles and settings belong to the whole cluster, and the next document starts anew.
    let mut superuser = cluster.connect();
    superuser.batch_execute(&format!("DROP DATABASE {database} WITH (FORCE); ")).expect("DROP DATABASE");
    let roles = "SELECT string_agg(quote_ident(rolname), ', ') FROM pg_roles
                  WHERE rolname !~ '^pg_' AND rolname <> 'postgres'";
    let roles = value(&mut superuser, roles);
    if roles != "NULL" {
        superuser.batch_execute(&format!("DROP ROLE {roles}")).expect("DROP ROLE");
    }
    superuser.batch_execute("ALTER SYSTEM RESET ALL").expect("ALTER SYSTEM");
    simple(&mut superuser, "SELECT pg_reload_conf()").expect("a reload");
    faults
}

#[test]
fn every_sql_block_of_the_documentation_runs_and_prints_what_is_shown() {
    let cluster = Cluster::start(&[]);
    let faults: Vec<_> = documents().iter().flat_map(|path| check(&cluster, path)).collect();
    assert!(faults.is_empty(), "\n{}", faults.join("\n\n"));
}

#[test]
fn the_readme_and_the_reference_show_sql_with_its_result() {
    for path in documents().iter().filter(|path| path.ends_with("README.md") || path.ends_with("reference.md")) {
        let markdown = std::fs::read_to_string(path).expect("a document");
        let blocks = blocks(&markdown);
        let shown = |pair: &&[Block]| pair[0].language == "sql" && pair[1].language == "text" && pair[1].follows;
        assert!(blocks.windows(2).filter(shown).count() > 0, "{}", path.display());
    }
    assert!(documents().iter().any(|path| path.ends_with("reference.md")), "docs/reference.md is missing");
}

#[test]
fn a_document_that_shows_a_wrong_result_or_runs_into_an_error_is_found() {
    let cluster = Cluster::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("wrong.md");
    for (markdown, faults) in [
        ("```sql\nSELECT 1 AS a;\n```\n```text\n a \n---\n 1\n(1 row)\n```\n", 0),
        ("```sql\nSELECT 1 AS a;\n```\n\n```text\n a \n---\n 2\n(1 row)\n```\n", 1),
        ("```sql\nSELECT 1/0;\n```\n", 1),
        ("```sql\nSELECT 1/0;\n```\n```text\nERROR:  division by zero\n```\n", 0),
        ("```sql\nSELECT 1/0;\n```\nprose\n```text\nERROR:  division by zero\n```\n", 1),
        ("```sql\nCREATE ROLE left_behind;\n```\n```\nno language\n```\n", 0),
        ("```sql\nCREATE ROLE left_behind;\n```\n", 0),
    ] {
        std::fs::write(&path, markdown).expect("a document");
        assert_eq!(check(&cluster, &path).len(), faults, "{markdown}");
    }
}
