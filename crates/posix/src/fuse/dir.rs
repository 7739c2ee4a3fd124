//! Directory streams: pages of entries between the owner and the kernel's `readdir`.
//!
//! The position that the kernel hands back is the cookie of the last entry it took: 1 is `.`, 2 is `..`. The stream
//! remembers its present page. If the cookie is not in that page (after `seekdir`, or from an NFS client after a
//! restart), the directory is scanned from its beginning.

use std::sync::Arc;
use std::time::Duration;

use base::{FsError, Ino};
use client::{Attr, Client, DirEntry, DirPosition, NameTerm};
use fuse::{DirReply, Errno, FileType, OpenFlags, Reply, Terms};

use super::Fuse;
use super::attr::{errno, file_attr, file_type};

/// Entries per request.
const PAGE: u32 = 512;

const DOT: u64 = 1;
const DOT_DOT: u64 = 2;

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
    fn new(ino: Ino) -> Self {
        Self { ino, page: Vec::new(), term: None, page_is_last: false, parent: Ino(0) }
    }

    fn parent(&self) -> Ino {
        self.parent
    }

    /// How long the kernel may cache the names of the page if it gets them now.
    fn term(&self, client: &Client) -> Duration {
        self.term.map_or(Duration::ZERO, |term| client.name_term(&term))
    }

    /// Pins an entry of the page.
    fn pin(&self, client: &Client, entry: &DirEntry) -> Attr {
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
    async fn after(&mut self, client: &Client, cookie: u64) -> Result<&[DirEntry], FsError> {
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

impl Fuse {
    fn dir(&self, handle: u64) -> Option<Arc<tokio::sync::Mutex<DirStream>>> {
        self.dirs.lock().expect("no holder of this lock panics").get(&handle).cloned()
    }

    pub(super) fn open_dir(&self, ino: Ino, reply: Reply) {
        let handle = self.new_handle();
        let stream = Arc::new(tokio::sync::Mutex::new(DirStream::new(ino)));
        self.dirs.lock().expect("no holder of this lock panics").insert(handle, stream);
        if !reply.opened(handle, OpenFlags::default()) {
            self.dirs.lock().expect("no holder of this lock panics").remove(&handle);
        }
    }

    pub(super) fn release_dir(&self, handle: u64, reply: Reply) {
        self.dirs.lock().expect("no holder of this lock panics").remove(&handle);
        reply.done();
    }

    pub(super) fn read_dir(&self, ino: Ino, handle: u64, offset: u64, size: u32, plus: bool, reply: Reply) {
        let Some(stream) = self.dir(handle) else { return reply.error(Errno::BADF) };
        let out = DirReply::new(size);
        self.run(reply, |client, reply| async move {
            let mut stream = stream.lock().await;
            let read = match plus {
                false => stream.list(&client, ino, offset, out).await.map(|out| (out, Vec::new())),
                true => stream.list_plus(&client, ino, offset, out).await,
            };
            match read {
                Ok((out, pinned)) => {
                    if !reply.dir(&out) {
                        pinned.into_iter().for_each(|ino| client.forget(ino, 1));
                    }
                }
                // Removed elsewhere: as in a local filesystem, programs that list it see no entries.
                Err(FsError::Stale) => reply.error(Errno::NOENT),
                Err(error) => reply.error(errno(error)),
            }
        });
    }
}

impl DirStream {
    /// Adds the entries after `offset`, as many as fit.
    async fn list(
        &mut self,
        client: &Client,
        ino: Ino,
        offset: u64,
        mut out: DirReply,
    ) -> Result<DirReply, FsError> {
        let entries = self.after(client, offset).await?.to_vec();
        let dots = [(DOT, ino, "."), (DOT_DOT, self.parent(), "..")];
        for (cookie, number, name) in dots.into_iter().filter(|dot| offset < dot.0) {
            if !out.add(number.0, FileType::Directory, cookie, name.as_bytes()) {
                return Ok(out);
            }
        }
        for entry in entries {
            if !out.add(entry.attr.ino.0, file_type(entry.attr.kind), entry.cookie, &entry.name) {
                break;
            }
        }
        Ok(out)
    }

    /// As [`DirStream::list`], with attributes. Returns the inodes that were pinned.
    async fn list_plus(
        &mut self,
        client: &Client,
        ino: Ino,
        offset: u64,
        mut out: DirReply,
    ) -> Result<(DirReply, Vec<Ino>), FsError> {
        let entries = self.after(client, offset).await?.to_vec();
        let dots = [(DOT, ino, "."), (DOT_DOT, self.parent(), "..")];
        for (cookie, number, name) in dots.into_iter().filter(|dot| offset < dot.0) {
            let attr = file_attr(&client.getattr(number).await?);
            let term = client.attr_term(number);
            if !out.add_plus(&attr, Terms { name: term, attr: term }, cookie, name.as_bytes()) {
                return Ok((out, Vec::new()));
            }
        }
        let mut pinned = Vec::new();
        for entry in entries {
            client.wait_for_pages(entry.attr.ino).await;
            let attr = self.pin(client, &entry);
            let terms = Terms { name: self.term(client), attr: client.attr_term(attr.ino) };
            if !out.add_plus(&file_attr(&attr), terms, entry.cookie, &entry.name) {
                client.forget(entry.attr.ino, 1);
                break;
            }
            pinned.push(entry.attr.ino);
        }
        Ok((out, pinned))
    }
}
