//! Fingerprints: what is kept of a request or payload that must not be kept itself.
//!
//! A fingerprint is one byte that names its version, and the SHA-256 of the canonical form of that version. Documented
//! with test vectors in docs/reference.md, so that another language can compute it; a version never changes.

use std::fmt::Write;

use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::raw::Jsonb;

const VERSION_1: u8 = 1;
/// How deep arrays and objects may be nested, so that no value exhausts the stack.
const LEVELS: usize = 127;

/// The fingerprint of the current version.
pub fn of(value: Jsonb) -> Result<Vec<u8>, Error> {
    of_json(&json(value)?)
}

/// As [`of`], of a value that is written as JSON.
pub fn of_json(json: &str) -> Result<Vec<u8>, Error> {
    version_1(json)
}

/// Whether a saved fingerprint, of whatever version, is that of the value. One of a version that this library does not
/// know, left by a later one, matches nothing.
pub fn matches(saved: &[u8], value: Jsonb) -> Result<bool, Error> {
    matches_json(saved, &json(value)?)
}

/// As [`matches`], of a value that is written as JSON.
pub fn matches_json(saved: &[u8], json: &str) -> Result<bool, Error> {
    match saved.first() {
        Some(&VERSION_1) => Ok(saved == version_1(json)?),
        _ => Ok(false),
    }
}

/// The value as JSON.
pub fn json(value: Jsonb) -> Result<String, Error> {
    String::from_utf8(value.to_utf8()).map_err(|_| Error::TooComplex)
}

fn version_1(json: &str) -> Result<Vec<u8>, Error> {
    let canonical = canonical(json, || {
        pgrx::check_for_interrupts!();
    })?;
    Ok(std::iter::once(VERSION_1).chain(Sha256::digest(canonical)).collect())
}

/// Version 1 of the canonical form: no white space, members in the order of their names' UTF-8 bytes, numbers as
/// significant digits and a power of ten, in strings only `"`, `\` and control characters escaped.
///
/// Takes the text of the server, which is valid JSON, apart in one pass: a number keeps its digits, and no object is
/// mistaken for one, as where a parser represents exact numbers by objects of its own. `pause` is called at each value.
fn canonical(json: &str, pause: fn()) -> Result<String, Error> {
    let mut canonical = String::with_capacity(json.len());
    Walk { rest: json.trim_start(), pause }.value(0, &mut canonical)?;
    Ok(canonical)
}

struct Walk<'a> {
    rest: &'a str,
    pause: fn(),
}

impl<'a> Walk<'a> {
    fn value(&mut self, depth: usize, canonical: &mut String) -> Result<(), Error> {
        (self.pause)();
        match self.rest.as_bytes().first() {
            Some(b'{' | b'[') if depth == LEVELS => return Err(Error::TooComplex),
            Some(b'{') => {
                let mut members = Vec::new();
                self.skip(1);
                while !self.rest.is_empty() && !self.rest.starts_with('}') {
                    let name = self.string()?;
                    self.skip(1);
                    let mut member = String::new();
                    self.value(depth + 1, &mut member)?;
                    members.push((name, member));
                    self.skip(usize::from(self.rest.starts_with(',')));
                }
                self.skip(1);
                members.sort_unstable();
                canonical.push('{');
                for (at, (name, member)) in members.into_iter().enumerate() {
                    canonical.push_str(if at > 0 { "," } else { "" });
                    write_string(&name, canonical);
                    canonical.push(':');
                    canonical.push_str(&member);
                }
                canonical.push('}');
            }
            Some(b'[') => {
                self.skip(1);
                canonical.push('[');
                while !self.rest.is_empty() && !self.rest.starts_with(']') {
                    self.value(depth + 1, canonical)?;
                    let more = self.rest.starts_with(',');
                    canonical.push_str(if more { "," } else { "" });
                    self.skip(usize::from(more));
                }
                self.skip(1);
                canonical.push(']');
            }
            Some(b'"') => write_string(&self.string()?, canonical),
            Some(b'-' | b'0'..=b'9') => write_number(self.token(|c| ",]} \n\r\t".contains(c)), canonical),
            _ => canonical.push_str(self.token(|c| !c.is_ascii_lowercase())),
        }
        Ok(())
    }

    /// The string that comes next, decoded by a parser.
    fn string(&mut self) -> Result<String, Error> {
        let mut escaped = true; // the opening quote does not end it
        let end = self.rest.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let token = &self.rest[..end.map_or(self.rest.len(), |end| end + 1)];
        self.skip(token.len());
        serde_json::from_str(token).map_err(Error::Json)
    }

    /// What comes next, up to a character that ends it.
    fn token(&mut self, ends: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest;
        let token = &rest[..rest.find(ends).unwrap_or(rest.len())];
        // Never nothing, so that no text keeps the walk from its end.
        self.skip(token.len().max(usize::from(!rest.is_empty())));
        token
    }

    /// Goes on by so many bytes, and past white space.
    fn skip(&mut self, bytes: usize) {
        self.rest = self.rest.get(bytes..).unwrap_or_default().trim_start();
    }
}

/// Writes a decimal number as its significant digits without leading and trailing zeros, `e`, and the power of ten:
/// `1`, `1.0` and `1.00` are `1e0`, `-1200` is `-12e2`, `0.05` is `5e-2`, and every zero is `0`.
fn write_number(number: &str, canonical: &mut String) {
    let (mantissa, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
    let (sign, digits) = match mantissa.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", mantissa),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let digits = format!("{whole}{fraction}");
    let significant = digits.trim_start_matches('0').trim_end_matches('0');
    if significant.is_empty() {
        canonical.push('0');
        return;
    }
    let trailing_zeros = digits.len() - digits.trim_end_matches('0').len();
    let length = |text: &str| i64::try_from(text.len()).unwrap_or(i64::MAX);
    let power = exponent.parse::<i64>().unwrap_or(0) - length(fraction) + length(&digits[..trailing_zeros]);
    // Writing to a String cannot fail.
    let _ = write!(canonical, "{sign}{significant}e{power}");
}

fn write_string(string: &str, canonical: &mut String) {
    canonical.push('"');
    for c in string.chars() {
        match c {
            '"' => canonical.push_str("\\\""),
            '\\' => canonical.push_str("\\\\"),
            '\0'..='\u{1f}' => {
                let _ = write!(canonical, "\\u{:04x}", u32::from(c));
            }
            _ => canonical.push(c),
        }
    }
    canonical.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(json: &str) -> String {
        super::canonical(json, || ()).expect("not too complex")
    }

    #[test]
    fn equal_numbers_have_one_form() {
        for one in ["1", "1.0", "1.00", "1e0", "0.1e1", "10e-1", "01e0".trim_start_matches('0')] {
            assert_eq!(canonical(one), "1e0", "{one}");
        }
        for (json, form) in [
            ("0", "0"),
            ("-0.00", "0"),
            ("-1200", "-12e2"),
            ("0.05", "5e-2"),
            ("100.50", "1005e-1"),
            ("9223372036854775807", "9223372036854775807e0"),
            ("123456789012345678901234567890.1", "1234567890123456789012345678901e-1"),
        ] {
            assert_eq!(canonical(json), form);
        }
    }

    #[test]
    fn different_values_have_different_forms() {
        let values = [
            "1",
            "10",
            "0.1",
            "-1",
            "\"1\"",
            "\"1e0\"",
            "[1]",
            "{\"1\":1}",
            "null",
            "\"null\"",
            "[]",
            "{}",
            "\"\"",
            "[[]]",
            "[1,2]",
            "[2,1]",
            "[[1],2]",
            "{\"a\":1,\"b\":2}",
            "{\"a\":2,\"b\":1}",
            "true",
            "false",
            r#"{"$serde_json::private::Number":"1"}"#,
            r#"{"$serde_json::private::RawValue":"1"}"#,
        ];
        let mut forms: Vec<String> = values.iter().map(|value| canonical(value)).collect();
        forms.sort();
        forms.dedup();
        assert_eq!(forms.len(), values.len());
    }

    #[test]
    fn nesting_has_a_limit() {
        let nested = |levels| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert_eq!(canonical(&nested(127)), nested(127));
        assert!(matches!(super::canonical(&nested(128), || ()), Err(Error::TooComplex)));
    }

    #[test]
    fn members_are_ordered_by_bytes_and_white_space_goes() {
        assert_eq!(
            canonical(r#"{ "b": [ 1, { } ], "aa": 2.50, "é": null, "a": true }"#),
            r#"{"a":true,"aa":25e-1,"b":[1e0,{}],"é":null}"#
        );
    }

    #[test]
    fn strings_escape_what_they_must() {
        assert_eq!(canonical(r#""\u0041\"\\\/\n\u00e9😀""#), "\"A\\\"\\\\/\\u000aé😀\"");
    }
}
