//! Rules about Rust sources: lengths, words, marks of unfinished work.

use std::ops::Range;
use std::path::Path;

use super::Finding;
use super::lexer::{self, is_word};

const FILE_LINES_MAX: usize = 800;
const FUNCTION_LINES_MAX: usize = 70;

/// Words with another or no clear meaning; see "Words" in STYLE.md.
const FORBIDDEN_WORDS: &[&str] = &["chunk", "brick", "osd", "master", "slave"];

/// Names of the standard library and of `bytes` that contain such a word.
const FOREIGN_NAMES: &[&str] = &[
    "chunks",
    "chunks_exact",
    "chunks_exact_mut",
    "chunks_mut",
    "rchunks",
    "rchunks_exact",
    "as_chunks",
    "as_chunks_mut",
    "array_chunks",
    "chunk_by",
    "chunk_by_mut",
    "chunk",
    "chunk_mut",
    "Chunks",
    "ChunksExact",
];

/// Checks one file. `path` is for the findings, and to recognise test files.
pub fn check(path: &Path, source: &str) -> Vec<Finding> {
    let layers = lexer::split(source);
    let tests = test_modules(&layers.code);
    let line_of = |at: usize| source.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1;
    let mut findings = Vec::new();
    let mut report =
        |line: usize, message: String| findings.push(Finding { path: path.to_path_buf(), line, message });

    if !is_test_file(path) {
        let test_lines: usize = tests.iter().map(|range| line_of(range.end) - line_of(range.start) + 1).sum();
        let lines = source.lines().count() - test_lines;
        if lines > FILE_LINES_MAX {
            report(1, format!("file is too long: lines={lines} max={FILE_LINES_MAX} (without tests)"));
        }
        let functions = functions(&layers.code).into_iter();
        for (name, range) in
            functions.filter(|(_, range)| !tests.iter().any(|test| test.contains(&range.start)))
        {
            let lines = line_of(range.end) - line_of(range.start) + 1;
            if lines > FUNCTION_LINES_MAX {
                let message =
                    format!("function is too long: name={name} lines={lines} max={FUNCTION_LINES_MAX}");
                report(line_of(range.start), message);
            }
        }
    }
    for (at, name) in identifiers(&layers.code).filter(|(at, name)| is_forbidden(&layers.code, *at, name)) {
        report(line_of(at), format!("word is not used here: name={name}"));
    }
    for (line, comment) in (1..).zip(layers.comments.lines()).filter(|(_, comment)| is_unnumbered(comment)) {
        report(line, format!("work left without an issue number, write #123: {}", comment.trim()));
    }
    findings
}

fn is_test_file(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "tests") || path.ends_with("tests.rs")
}

/// The ranges of `#[cfg(test)] mod name { … }`.
fn test_modules(code: &str) -> Vec<Range<usize>> {
    let starts = code.match_indices("#[cfg(test)]").map(|(at, _)| at);
    let inline_module = |start: usize| {
        let rest = &code[start..];
        let body = rest.find(['{', ';']).filter(|at| rest.as_bytes()[*at] == b'{')?;
        let header: Vec<&str> = rest[..body].split_whitespace().collect();
        header.contains(&"mod").then(|| start..start + body + block_len(&rest[body..]))
    };
    starts.filter_map(inline_module).collect()
}

/// Name and range, from `fn` to the last brace, of every function with a body.
fn functions(code: &str) -> Vec<(&str, Range<usize>)> {
    let mut words = identifiers(code).peekable();
    let mut found = Vec::new();
    while let Some((start, word)) = words.next() {
        if word != "fn" {
            continue;
        }
        // `fn(u8) -> u8` is a type: no name follows directly.
        let Some((at, name)) = words.peek().filter(|(at, _)| code[start + 2..*at].trim().is_empty()) else {
            continue;
        };
        if let Some(body) = body_start(&code[*at..]).map(|body| at + body) {
            found.push((*name, start..body + block_len(&code[body..]) - 1));
        }
    }
    found
}

/// Where the body begins, unless the declaration ends with a semicolon. Semicolons in `[u8; 4]` do not count.
fn body_start(declaration: &str) -> Option<usize> {
    let mut depth = 0i32;
    for (at, byte) in declaration.bytes().enumerate() {
        match byte {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth -= 1,
            b'{' if depth == 0 => return Some(at),
            b';' if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

/// Length of a block with its braces.
fn block_len(block: &str) -> usize {
    let mut depth = 0i32;
    for (at, byte) in block.bytes().enumerate() {
        depth += match byte {
            b'{' => 1,
            b'}' => -1,
            _ => 0,
        };
        if depth == 0 {
            return at + 1;
        }
    }
    block.len()
}

/// Every identifier and keyword, with its place.
fn identifiers(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let bytes = code.as_bytes();
    let is_start = move |at: &usize| is_word(bytes[*at]) && (*at == 0 || !is_word(bytes[*at - 1]));
    let word = move |at: usize| {
        let len = bytes[at..].iter().take_while(|byte| is_word(**byte)).count();
        (at, &code[at..at + len])
    };
    (0..bytes.len()).filter(is_start).map(word).filter(|(_, word)| !word.as_bytes()[0].is_ascii_digit())
}

fn is_forbidden(code: &str, at: usize, name: &str) -> bool {
    let before = code[..at].trim_end();
    let is_foreign = FOREIGN_NAMES.contains(&name) && (before.ends_with('.') || before.ends_with("::"));
    !is_foreign && words(name).iter().any(|word| FORBIDDEN_WORDS.contains(&word.trim_end_matches('s')))
}

/// The words of `snake_case` and `CamelCase` names, in lower case.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut previous = '_';
    for letter in name.chars() {
        if letter == '_' || (letter.is_uppercase() && previous.is_lowercase()) {
            words.push(String::new());
        }
        if letter != '_' {
            words.last_mut().expect("begins with a word").push(letter.to_ascii_lowercase());
        }
        previous = letter;
    }
    words
}

/// Whether a comment marks work left to do without the number of its issue.
fn is_unnumbered(comment: &str) -> bool {
    let mut marks = identifiers(comment).filter(|(_, word)| *word == "TODO");
    marks.any(|(at, _)| {
        let rest = comment[at + 4..].trim_start_matches(['(', ' ']);
        !rest.strip_prefix('#').is_some_and(|number| number.starts_with(|digit: char| digit.is_ascii_digit()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_at(path: &str, source: &str, expected: &[(usize, &str)]) {
        let findings = check(Path::new(path), source);
        let found: Vec<_> = findings.iter().map(|finding| (finding.line, finding.message.as_str())).collect();
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for ((line, message), (expected_line, part)) in found.iter().zip(expected) {
            assert_eq!(line, expected_line, "{message}");
            assert!(message.contains(part), "{message}");
        }
    }

    #[track_caller]
    fn check_source(source: &str, expected: &[(usize, &str)]) {
        check_at("crates/x/src/lib.rs", source, expected);
    }

    fn function(lines: usize) -> String {
        format!("fn long(a: [u8; 2]) -> [u8; 2] {{\n{}}}\n", "    a;\n".repeat(lines - 2))
    }

    #[test]
    fn functions_may_have_seventy_lines() {
        check_source(&function(70), &[]);
        check_source(&format!("\n{}", function(71)), &[(2, "name=long lines=71 max=70")]);
        check_source(&format!("impl X {{\n{}}}\n", function(80)), &[(2, "lines=80")]);
        check_source(&format!("trait X {{ fn short(&self); }}\n{}", function(71)), &[(2, "lines=71")]);
        check_source(&format!("type F = fn(u8) -> u8;\n{}", function(71)), &[(2, "lines=71")]);
    }

    #[test]
    fn braces_in_literals_and_comments_do_not_count() {
        let source =
            format!("fn f() {{ let a = \"{{\"; /* {{ */ '{{' }} // {{\n{}", "const A: u8 = 0;\n".repeat(90));
        check_source(&source, &[]);
    }

    #[test]
    fn files_may_have_eight_hundred_lines_without_tests() {
        let code = "const A: u8 = 0;\n".repeat(800);
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", function(200));
        check_source(&code, &[]);
        check_source(&format!("{code}{tests}"), &[]);
        check_source(&format!("{code}\n{tests}"), &[(1, "lines=801 max=800")]);
        check_at("crates/x/src/lib/tests.rs", &code.repeat(2), &[]);
        check_at("tests/mount.rs", &code.repeat(2), &[]);
        check_source(&format!("#[cfg(test)]\nmod tests;\n{}", function(75)), &[(3, "lines=75")]);
    }

    #[test]
    fn forbidden_words_are_reported_in_names_only() {
        check_source(
            "fn f(chunk: u8) {}\nstruct BrickMap;\nconst OSD_COUNT: u8 = 0;",
            &[(1, "name=chunk"), (2, "name=BrickMap"), (3, "name=OSD_COUNT")],
        );
        check_source("// a chunk\nlet a = \"master\";", &[]);
        check_source("bytes.chunks_exact(4); buffer\n    .chunk(); slice::Chunks::new()", &[]);
        check_source("let chunks = bytes.chunks(4);", &[(1, "name=chunks")]);
        check_source("fn masterful() {} fn closdown() {}", &[]);
    }

    #[test]
    fn work_left_has_an_issue_number() {
        check_source("// TODO(#12): widen\n// TODO #7 narrow\n", &[]);
        check_source("\n/// TODO: later\nlet a = \"TODO\";", &[(2, "TODO: later")]);
        check_source("let todo = TODO;", &[]);
    }
}
