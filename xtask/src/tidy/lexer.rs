//! Enough of Rust's lexical structure to distinguish code, comments and literals.

/// A source text split into two texts of the same shape: bytes of the other kind become spaces, newlines stay.
pub struct Layers {
    /// Code, with the quotes of literals but without their content.
    pub code: String,
    /// Comments.
    pub comments: String,
}

/// Splits a source text.
pub fn split(source: &str) -> Layers {
    let bytes = source.as_bytes();
    let mut kinds = vec![Kind::Code; bytes.len()];
    let mut at = 0;
    while at < bytes.len() {
        let (len, kind) = token(&bytes[at..], at > 0 && is_word(bytes[at - 1]));
        let end = (at + len.max(1)).min(bytes.len());
        kinds[at..end].fill(kind);
        at = end;
    }
    Layers { code: layer(bytes, &kinds, Kind::Code), comments: layer(bytes, &kinds, Kind::Comment) }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Code,
    Comment,
    Literal,
}

fn layer(bytes: &[u8], kinds: &[Kind], wanted: Kind) -> String {
    let keep = |(byte, kind): (&u8, &Kind)| match (*byte, *kind == wanted) {
        (b'\n', _) => '\n',
        (byte, true) if byte.is_ascii() => char::from(byte),
        _ => ' ',
    };
    bytes.iter().zip(kinds).map(keep).collect()
}

/// Length and kind of the token at the start of `rest`. If it is neither a comment nor a literal, it is one byte of
/// code.
fn token(rest: &[u8], after_word: bool) -> (usize, Kind) {
    match rest {
        [b'/', b'/', ..] => (position(rest, b"\n").unwrap_or(rest.len()), Kind::Comment),
        [b'/', b'*', ..] => (block_comment_len(rest), Kind::Comment),
        [b'"', ..] => (quoted_len(rest, b'"'), Kind::Literal),
        [b'r', ..] | [b'b', b'r', ..] | [b'c', b'r', ..] if !after_word => raw_string(rest),
        [b'\'', b'\\', ..] => (quoted_len(rest, b'\''), Kind::Literal),
        [b'\'', ..] => char_or_lifetime(rest),
        _ => (1, Kind::Code),
    }
}

fn position(bytes: &[u8], pattern: &[u8]) -> Option<usize> {
    bytes.windows(pattern.len()).position(|window| window == pattern)
}

/// Block comments nest.
fn block_comment_len(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0usize, 0);
    while at + 1 < rest.len() {
        match &rest[at..at + 2] {
            b"/*" => depth += 1,
            b"*/" => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

fn quoted_len(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    at + 1
}

fn raw_string(rest: &[u8]) -> (usize, Kind) {
    let prefix = if rest[0] == b'r' { 1 } else { 2 };
    let hashes = rest[prefix..].iter().take_while(|byte| **byte == b'#').count();
    let body = prefix + hashes + 1;
    if rest.get(body - 1) != Some(&b'"') {
        return (1, Kind::Code);
    }
    let mut end = vec![b'"'];
    end.resize(hashes + 1, b'#');
    let len = position(&rest[body..], &end).map_or(rest.len(), |at| body + at + end.len());
    (len, Kind::Literal)
}

/// `'x'` is a literal; `'x` without a quote after one character is a lifetime.
fn char_or_lifetime(rest: &[u8]) -> (usize, Kind) {
    let text = String::from_utf8_lossy(&rest[1..rest.len().min(6)]);
    let width = text.chars().next().map_or(0, char::len_utf8);
    if rest.get(1 + width) == Some(&b'\'') { (width + 2, Kind::Literal) } else { (1, Kind::Code) }
}

/// Whether the byte may be part of an identifier.
pub fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(source: &str, code: &str, comments: &str) {
        let squeeze = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let layers = split(source);
        assert_eq!(layers.code.lines().count(), source.lines().count());
        assert_eq!(squeeze(&layers.code), code, "code of {source}");
        assert_eq!(squeeze(&layers.comments), comments, "comments of {source}");
    }

    #[test]
    fn comments_and_literals_are_separated_from_code() {
        check("let a = 1; // why\nlet b;", "let a = 1; let b;", "// why");
        check("a /* x /* y */ z */ b", "a b", "/* x /* y */ z */");
        check(r#"call("{ // no", b"}")"#, "call( , b )", "");
        check(r##"call(r#"a " b"#, br"{", "\"{")"##, "call( , , )", "");
        check("match c { '{' | '\\'' | '\u{e9}' => {} }", "match c { | | => {} }", "");
        check("fn f<'a>(x: &'a str) -> &'a str { x }", "fn f<'a>(x: &'a str) -> &'a str { x }", "");
        check("let for_r = var; r#type", "let for_r = var; r#type", "");
        check("\"unfinished", "", "");
        check("/* unfinished", "", "/* unfinished");
    }
}
