//! Directory streams: pages of entries between the owner and the kernel's `readdir`.
//!
//! The position that the kernel hands back is the cookie of the last entry it took: 1 is `.`, 2 is `..`. The stream
//! remembers its present page. If the cookie is not in that page (after `seekdir`, or from an NFS client after a
//! restart), the directory is scanned from its beginning.

use std::time::Duration;

use base::{FsError, Ino};
use client::{Attr, Client, DirEntry, DirPosition, NameTerm};

/// Entries per request.
const PAGE: u32 = 512;

pub(super) const DOT: u64 = 1;
pub(super) const DOT_DOT: u64 = 2;

/// An open directory.
#[derive(Debug)]
pub(super) struct DirStream {
    ino: Ino,
    page: Vec<DirEntry>,
    /// Of the page, once there is one.
    term: Option<NameTerm>,
    page_is_last: bool,
    parent: Ino,
}

impl DirStream {
    pub(super) fn new(ino: Ino) -> Self {
        Self { ino, page: Vec::new(), term: None, page_is_last: false, parent: Ino(0) }
    }

    pub(super) fn parent(&self) -> Ino {
        self.parent
    }

    /// How long the kernel may cache the names of the page if it gets them now.
    pub(super) fn term(&self, client: &Client) -> Duration {
        self.term.map_or(Duration::ZERO, |term| client.name_term(&term))
    }

    /// Pins an entry of the page.
    pub(super) fn pin(&self, client: &Client, entry: &DirEntry) -> Attr {
        self.term.map_or(entry.attr, |term| client.pin_entry(&term, entry))
    }

    async fn load(&mut self, client: &Client, after: Option<DirPosition>) -> Result<(), FsError> {
        let page = client.readdir(self.ino, after, PAGE).await?;
        self.page = page.entries;
        self.term = Some(page.term);
        self.page_is_last = page.end;
        self.parent = page.parent;
        Ok(())
    }

    async fn next_page(&mut self, client: &Client) -> Result<(), FsError> {
        let Some(last) = self.page.last() else {
            self.page_is_last = true;
            return Ok(());
        };
        let after = DirPosition { name: last.name.clone(), kind: last.attr.kind };
        self.load(client, Some(after)).await
    }

    /// The entries after the cookie; none at the end.
    pub(super) async fn after(&mut self, client: &Client, cookie: u64) -> Result<&[DirEntry], FsError> {
        if cookie <= DOT_DOT {
            self.load(client, None).await?;
            return Ok(&self.page);
        }
        if let Some(next) = self.index_after(cookie) {
            return self.entries_from(client, next).await;
        }
        self.load(client, None).await?;
        loop {
            if let Some(next) = self.index_after(cookie) {
                return self.entries_from(client, next).await;
            }
            if self.page_is_last {
                return Ok(&[]);
            }
            self.next_page(client).await?;
        }
    }

    fn index_after(&self, cookie: u64) -> Option<usize> {
        self.page.iter().position(|entry| entry.cookie == cookie).map(|index| index + 1)
    }

    async fn entries_from(&mut self, client: &Client, index: usize) -> Result<&[DirEntry], FsError> {
        if index < self.page.len() {
            return Ok(&self.page[index..]);
        }
        if self.page_is_last {
            return Ok(&[]);
        }
        self.next_page(client).await?;
        Ok(&self.page)
    }
}
