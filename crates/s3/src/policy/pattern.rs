//! Patterns with `*`, `?` and variables, in actions, resources and `StringLike`.

/// The value that a variable is replaced by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Variable {
    /// `${aws:username}`.
    UserName,
    /// `${aws:userid}`.
    UserId,
}

impl Variable {
    fn named(name: &str) -> Option<Self> {
        match name.to_ascii_lowercase().as_str() {
            "aws:username" => Some(Self::UserName),
            "aws:userid" => Some(Self::UserId),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    /// A literal byte.
    Byte(u8),
    /// `?`: exactly one character.
    One,
    /// `*`: any number of characters, also none.
    Many,
    /// The value of a variable, literally.
    Variable(Variable),
}

/// A pattern. It matches bytes; `?` is one UTF-8 character.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pattern {
    tokens: Vec<Token>,
    has_variables: bool,
}

/// Special characters of a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Syntax {
    /// `*` and `?`.
    pub(super) wildcards: bool,
    /// `${…}`.
    pub(super) variables: bool,
}

/// Whether upper and lower case differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Case {
    /// Upper and lower case differ.
    Differs,
    /// ASCII letters are equal in both cases.
    Ignored,
}

/// Values of variables in one request. `None`: the variable has no value, and a pattern with it does not match.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Values<'a> {
    pub(super) user_name: Option<&'a str>,
    pub(super) user_id: Option<&'a str>,
}

impl Pattern {
    /// The pattern `*`.
    pub(super) fn everything() -> Self {
        Self { tokens: vec![Token::Many], has_variables: false }
    }

    /// Reads a pattern.
    ///
    /// # Errors
    /// A message for people, if a variable is unknown or not closed.
    pub(super) fn parse(text: &str, syntax: Syntax) -> Result<Self, String> {
        let mut tokens = Vec::with_capacity(text.len());
        let mut has_variables = false;
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            if syntax.variables && rest.starts_with("${") {
                let Some((name, after)) = rest[2..].split_once('}') else {
                    return Err("variable is not closed".to_owned());
                };
                rest = after;
                match (name, Variable::named(name)) {
                    ("*" | "?" | "$", _) => tokens.push(Token::Byte(name.as_bytes()[0])),
                    (_, Some(variable)) => {
                        has_variables = true;
                        tokens.push(Token::Variable(variable));
                    }
                    _ => return Err(format!("variable is not known: name={name:?}")),
                }
                continue;
            }
            match first {
                // Several `*` in a row mean the same as one and would only cost time.
                '*' if syntax.wildcards && tokens.last() == Some(&Token::Many) => {}
                '*' if syntax.wildcards => tokens.push(Token::Many),
                '?' if syntax.wildcards => tokens.push(Token::One),
                _ => tokens.extend(rest[..first.len_utf8()].bytes().map(Token::Byte)),
            }
            rest = &rest[first.len_utf8()..];
        }
        Ok(Self { tokens, has_variables })
    }

    /// Whether `text` matches the pattern.
    pub(super) fn matches(&self, text: &str, values: Values<'_>, case: Case) -> bool {
        if !self.has_variables {
            return matches(&self.tokens, text.as_bytes(), case);
        }
        self.expanded(values).is_some_and(|tokens| matches(&tokens, text.as_bytes(), case))
    }

    /// The pattern with variables replaced; `None` if one has no value.
    fn expanded(&self, values: Values<'_>) -> Option<Vec<Token>> {
        let mut tokens = Vec::with_capacity(self.tokens.len());
        for token in &self.tokens {
            match token {
                Token::Variable(Variable::UserName) => {
                    tokens.extend(values.user_name?.bytes().map(Token::Byte))
                }
                Token::Variable(Variable::UserId) => tokens.extend(values.user_id?.bytes().map(Token::Byte)),
                token => tokens.push(*token),
            }
        }
        Some(tokens)
    }
}

/// After a mismatch, only the last `*` has to take one more character: time is at most the product of the lengths.
fn matches(tokens: &[Token], text: &[u8], case: Case) -> bool {
    let (mut token, mut at) = (0, 0);
    let mut last_many = None;
    while at < text.len() {
        let step = match tokens.get(token) {
            Some(Token::Many) => {
                last_many = Some((token, at));
                token += 1;
                continue;
            }
            Some(Token::One) => Some(char_len(text[at])),
            Some(Token::Byte(byte)) if equal(*byte, text[at], case) => Some(1),
            _ => None,
        };
        match (step, last_many) {
            (Some(step), _) => {
                token += 1;
                at += step;
            }
            (None, Some((many, from))) => {
                let from = from + char_len(text[from]);
                last_many = Some((many, from));
                (token, at) = (many + 1, from);
            }
            (None, None) => return false,
        }
    }
    tokens[token..].iter().all(|token| *token == Token::Many)
}

fn equal(left: u8, right: u8, case: Case) -> bool {
    match case {
        Case::Differs => left == right,
        Case::Ignored => left.eq_ignore_ascii_case(&right),
    }
}

/// Length of the character that begins with this byte, in valid UTF-8.
fn char_len(first: u8) -> usize {
    match first {
        0..0xC0 => 1,
        0xC0..0xE0 => 2,
        0xE0..0xF0 => 3,
        _ => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: Syntax = Syntax { wildcards: true, variables: true };
    const ANN: Values<'_> = Values { user_name: Some("a*n"), user_id: Some("7") };

    #[track_caller]
    fn check(pattern: &str, text: &str, expected: bool) {
        let parsed = Pattern::parse(pattern, ALL).unwrap();
        assert_eq!(parsed.matches(text, ANN, Case::Differs), expected, "{pattern} {text}");
    }

    #[test]
    fn wildcards_stand_for_text() {
        check("", "", true);
        check("", "a", false);
        check("*", "", true);
        check("a*", "a", true);
        check("a*c*e", "abcde", true);
        check("a*c*e", "abcd", false);
        check("?", "ß", true);
        check("??", "ß", false);
        check("*?", "数", true);
        check("*ab", "aab", true);
        check("a?c", "abc", true);
        check("a?c", "ac", false);
        check("bucket/*", "bucket/a/b", true);
        check("bucket/*", "bucket", false);
    }

    #[test]
    fn variables_stand_for_their_value_literally() {
        check("home/${aws:username}/*", "home/a*n/x", true);
        check("home/${aws:username}/*", "home/ann/x", false);
        check("${aws:userid}", "7", true);
        check("${*}${?}${$}", "*?$", true);
        check("${*}", "a", false);
        let pattern = Pattern::parse("*${aws:username}*", ALL).unwrap();
        assert!(!pattern.matches("anything", Values::default(), Case::Differs));
    }

    #[test]
    fn what_is_no_variable_is_refused() {
        assert!(Pattern::parse("${aws:nobody}", ALL).unwrap_err().contains("aws:nobody"));
        assert!(Pattern::parse("${aws:username", ALL).unwrap_err().contains("closed"));
        let plain = Pattern::parse("${x}*", Syntax { wildcards: false, variables: false }).unwrap();
        assert!(plain.matches("${x}*", ANN, Case::Differs));
    }

    #[test]
    fn many_stars_do_not_take_exponential_time() {
        let pattern = Pattern::parse(&"*a".repeat(500), ALL).unwrap();
        assert!(!pattern.matches(&format!("{}b", "a".repeat(1000)), ANN, Case::Differs));
    }

    /// Reference implementation of wildcards, exponential in time.
    fn reference(pattern: &[char], text: &[char]) -> bool {
        match pattern.split_first() {
            None => text.is_empty(),
            Some(('*', rest)) => (0..=text.len()).any(|at| reference(rest, &text[at..])),
            Some(('?', rest)) => !text.is_empty() && reference(rest, &text[1..]),
            Some((one, rest)) => text.first() == Some(one) && reference(rest, &text[1..]),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]
        #[test]
        fn matching_equals_the_reference(pattern in "[ab*?ß]{0,8}", text in "[abß]{0,8}") {
            let chars = |text: &str| text.chars().collect::<Vec<_>>();
            let parsed = Pattern::parse(&pattern, ALL).unwrap();
            let expected = reference(&chars(&pattern), &chars(&text));
            prop_assert_eq!(parsed.matches(&text, ANN, Case::Differs), expected);
        }

        #[test]
        fn a_pattern_of_plain_text_matches_itself_in_any_case(text in "[a-zA-Z0-9:]{0,16}") {
            let parsed = Pattern::parse(&text, ALL).unwrap();
            prop_assert!(parsed.matches(&text.to_uppercase(), ANN, Case::Ignored));
        }
    }
}
