// Pictures and files of messages: fetched with the user's token, shown from memory, kept for a while.
import { useEffect, useState } from "preact/hooks";
import type { Api } from "../edge/api";
import type { Attachment } from "../index";
import { Icon } from "./icons";
import { size } from "./lines";

const KEPT = 200;
const urls = new Map<string, Promise<string>>();

/** A URL of the attachment's bytes in this page's memory. */
export function blobUrl(api: Api, attachmentId: string, thumbnail: boolean): Promise<string> {
  const key = `${attachmentId} ${thumbnail}`;
  let url = urls.get(key);
  if (url) urls.delete(key);
  else {
    url = api.fetch(attachmentId, thumbnail).then((blob) => URL.createObjectURL(blob));
    url.catch(() => urls.delete(key));
  }
  urls.set(key, url); // the newest stand last
  const [oldest] = urls;
  if (urls.size > KEPT && oldest) {
    urls.delete(oldest[0]);
    void oldest[1].then((old) => URL.revokeObjectURL(old));
  }
  return url;
}

const isPicture = (a: Attachment): boolean => a.mediaType.startsWith("image/") && (a.thumbnail || a.width > 0);

const MOST_WIDTH = 320;
const MOST_HEIGHT = 320;

export function Attachments({ api, list, onView, onFail }: { api: Api; list: Attachment[]; onView: (a: Attachment) => void; onFail: (why: string) => void }) {
  return (
    <div class="attachments">
      {list.map((a) => (isPicture(a) ? <Picture key={a.attachmentId} api={api} attachment={a} onView={onView} /> : <FileLine key={a.attachmentId} api={api} attachment={a} onFail={onFail} />))}
    </div>
  );
}

function Picture({ api, attachment, onView }: { api: Api; attachment: Attachment; onView: (a: Attachment) => void }) {
  const [url, setUrl] = useState("");
  const [failed, setFailed] = useState(0);
  useEffect(() => {
    let gone = false;
    blobUrl(api, attachment.attachmentId, attachment.thumbnail).then(
      (found) => !gone && setUrl(found),
      () => !gone && failed < 5 && setTimeout(() => setFailed(failed + 1), 1_000 * 2 ** failed),
    );
    return () => {
      gone = true;
    };
  }, [attachment.attachmentId, failed]);
  const [width, height] = [attachment.width || 240, attachment.height || 180];
  const scale = Math.min(1, MOST_WIDTH / width, MOST_HEIGHT / height);
  const box = { width: Math.max(80, Math.round(width * scale)), height: Math.max(60, Math.round(height * scale)) };
  return (
    <button type="button" class="picture" aria-label={`Picture ${attachment.name}: show it large`} onClick={() => onView(attachment)} style={{ width: `${box.width}px`, aspectRatio: `${box.width} / ${box.height}` }}>
      {url ? <img src={url} alt={attachment.name} width={box.width} height={box.height} /> : <span class="picture-wait">{failed >= 5 ? "Not available" : ""}</span>}
    </button>
  );
}

function FileLine({ api, attachment, onFail }: { api: Api; attachment: Attachment; onFail: (why: string) => void }) {
  const save = async (): Promise<void> => {
    try {
      const link = document.createElement("a");
      link.href = await blobUrl(api, attachment.attachmentId, false);
      link.download = attachment.name || "file";
      link.click();
    } catch (e) {
      onFail((e as Error).message);
    }
  };
  return (
    <button type="button" class="file" onClick={() => void save()} aria-label={`Save the file ${attachment.name}`}>
      <Icon name="file" />
      <span>
        <b>{attachment.name || "File"}</b>
        <small>{size(Number(attachment.sizeBytes))}</small>
      </span>
    </button>
  );
}

/** One picture over the whole page. */
export function Viewer({ api, attachment, onClose }: { api: Api; attachment: Attachment; onClose: () => void }) {
  const [url, setUrl] = useState("");
  const [why, setWhy] = useState("");
  useEffect(() => {
    blobUrl(api, attachment.attachmentId, false).then(setUrl, (e: Error) => setWhy(e.message));
  }, [attachment.attachmentId]);
  return (
    <dialog class="viewer" aria-label={attachment.name} ref={(d) => {
        if (d && !d.open) d.showModal();
      }} onClose={onClose} onClick={onClose}>
      {url ? <img src={url} alt={attachment.name} /> : <p>{why || "…"}</p>}
      <button type="button" class="round" aria-label="Close" onClick={onClose}>
        <Icon name="close" />
      </button>
    </dialog>
  );
}
